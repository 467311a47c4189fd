"""MaxSim training for late-interaction retrievers, without padding and without a similarity tensor."""

import importlib

from pylate_fastmaxsim.tokens import TokenBatch

__version__ = "0.2.0"

# Loaded on first use: `enable` imports PyLate, and `import pylate_fastmaxsim` should not.
_NAMES = {
    "compressed": ("CompressedBatch", "compress"),
    "codec": ("ResidualCodec",),
    "retrieval.plaid": ("read_plaid",),
    "sparse": ("SparseBatch",),
    "retrieval.sparse_index": ("SparseIndex",),
    "retrieval.sparse_search": ("sparse_search",),
    "retrieval.static.model": ("StaticLateInteraction",),
    "retrieval.static.tokens": ("BM25",),
    "ops.maxsim": ("maxsim",),
    "ops.projection": ("maxsim_from_hidden",),
    "ops.xtr": ("xtr_scores",),
    "ops.splade": ("splade_pool",),
    "ops.pooled": ("pooled_scores",),
    "ops.score_metric": ("PooledScores",),
    "pooling": ("Max", "TopK", "Softmax", "LogSumExp"),
    "losses.encode": ("encode",),
    "precompile.processes": ("warmup",),
    "precompile.shapes": ("BatchShape",),
    "integrations.enable": ("enable", "disable", "enabled"),
}
_MODULES = {name: f"pylate_fastmaxsim.{module}" for module, names in _NAMES.items() for name in names}

__all__ = ["TokenBatch", "__version__", *_MODULES]


def __getattr__(name: str):
    if name not in _MODULES:
        raise AttributeError(f"module 'pylate_fastmaxsim' has no attribute {name!r}")
    # So that it is asked for once.
    value = globals()[name] = getattr(importlib.import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
