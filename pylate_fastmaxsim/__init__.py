"""MaxSim training for late-interaction retrievers, without padding and without a similarity tensor."""

from pylate_fastmaxsim.tokens import TokenBatch

__version__ = "0.1.0"

__all__ = ["TokenBatch", "maxsim", "enable", "disable", "enabled", "__version__"]


def __getattr__(name: str):
    # Loaded on first use: `enable` imports PyLate, and `import pylate_fastmaxsim` should not.
    if name == "maxsim":
        from pylate_fastmaxsim.ops.maxsim import maxsim

        return maxsim
    if name in ("enable", "disable", "enabled"):
        from pylate_fastmaxsim.integrations import switch

        return getattr(switch, name)
    raise AttributeError(f"module 'pylate_fastmaxsim' has no attribute {name!r}")
