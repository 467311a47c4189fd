"""MaxSim training for late-interaction retrievers, without padding and without a similarity tensor."""

from pylate_fastmaxsim.tokens import TokenBatch

__version__ = "0.1.0"

__all__ = ["TokenBatch", "maxsim", "maxsim_from_hidden", "xtr_scores", "enable", "disable", "enabled", "__version__"]


def __getattr__(name: str):
    # Loaded on first use: `enable` imports PyLate, and `import pylate_fastmaxsim` should not.
    if name == "maxsim":
        from pylate_fastmaxsim.ops.maxsim import maxsim

        return maxsim
    if name == "xtr_scores":
        from pylate_fastmaxsim.ops.xtr import xtr_scores

        return xtr_scores
    if name == "maxsim_from_hidden":
        from pylate_fastmaxsim.ops.head import maxsim_from_hidden

        return maxsim_from_hidden
    if name in ("enable", "disable", "enabled"):
        from pylate_fastmaxsim.integrations import switch

        return getattr(switch, name)
    raise AttributeError(f"module 'pylate_fastmaxsim' has no attribute {name!r}")
