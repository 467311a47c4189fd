"""MaxSim training for late-interaction retrievers, without padding and without a similarity tensor."""

import importlib

from pylate_fastmaxsim.tokens import TokenBatch

__version__ = "0.2.0"

__all__ = [
    "TokenBatch", "CompressedBatch", "ResidualCodec", "compress", "read_plaid", "SparseBatch", "SparseIndex", "sparse_search", "StaticLateInteraction", "BM25", "maxsim", "maxsim_from_hidden", "xtr_scores", "splade_pool", "pooled_scores", "PooledScores",
    "Max", "TopK", "Softmax", "LogSumExp", "encode", "warmup", "BatchShape", "enable", "disable", "enabled", "__version__",
]  # fmt: skip


# Loaded on first use: `enable` imports PyLate, and `import pylate_fastmaxsim` should not.
_MODULES = {
    "CompressedBatch": "pylate_fastmaxsim.compressed",
    "ResidualCodec": "pylate_fastmaxsim.codec",
    "compress": "pylate_fastmaxsim.compressed",
    "read_plaid": "pylate_fastmaxsim.retrieval.plaid.read",
    "SparseBatch": "pylate_fastmaxsim.sparse",
    "SparseIndex": "pylate_fastmaxsim.retrieval.sparse_index",
    "sparse_search": "pylate_fastmaxsim.retrieval.sparse_search",
    "StaticLateInteraction": "pylate_fastmaxsim.retrieval.static.model",
    "BM25": "pylate_fastmaxsim.retrieval.static.weights",
    "maxsim": "pylate_fastmaxsim.ops.maxsim",
    "maxsim_from_hidden": "pylate_fastmaxsim.ops.projection",
    "xtr_scores": "pylate_fastmaxsim.ops.xtr",
    "splade_pool": "pylate_fastmaxsim.ops.splade",
    "pooled_scores": "pylate_fastmaxsim.ops.pooled",
    "PooledScores": "pylate_fastmaxsim.ops.score_metric",
    "Max": "pylate_fastmaxsim.pooling",
    "TopK": "pylate_fastmaxsim.pooling",
    "Softmax": "pylate_fastmaxsim.pooling",
    "LogSumExp": "pylate_fastmaxsim.pooling",
    "encode": "pylate_fastmaxsim.losses.encode",
    "warmup": "pylate_fastmaxsim.precompile.processes",
    "BatchShape": "pylate_fastmaxsim.precompile.shapes",
    "enable": "pylate_fastmaxsim.integrations.enable",
    "disable": "pylate_fastmaxsim.integrations.enable",
    "enabled": "pylate_fastmaxsim.integrations.enable",
}


def __getattr__(name: str):
    if name not in _MODULES:
        raise AttributeError(f"module 'pylate_fastmaxsim' has no attribute {name!r}")
    # So that it is asked for once.
    value = globals()[name] = getattr(importlib.import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
