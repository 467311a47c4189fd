"""MaxSim training for late-interaction retrievers, without padding and without a similarity tensor."""

import importlib
from typing import TYPE_CHECKING

from pylate_fastmaxsim.tokens import TokenBatch

if TYPE_CHECKING:  # for editors and type checkers, which read no strings
    from pylate_fastmaxsim.codec import ResidualCodec as ResidualCodec
    from pylate_fastmaxsim.compressed import CompressedBatch as CompressedBatch
    from pylate_fastmaxsim.compressed import compress as compress
    from pylate_fastmaxsim.integrations.enable import disable as disable
    from pylate_fastmaxsim.integrations.enable import enable as enable
    from pylate_fastmaxsim.integrations.enable import enabled as enabled
    from pylate_fastmaxsim.integrations.enable import status as status
    from pylate_fastmaxsim.losses.encode import encode as encode
    from pylate_fastmaxsim.ops.maxsim import maxsim as maxsim
    from pylate_fastmaxsim.ops.pooled import pooled_scores as pooled_scores
    from pylate_fastmaxsim.ops.projection import maxsim_from_hidden as maxsim_from_hidden
    from pylate_fastmaxsim.ops.score_metric import PooledScores as PooledScores
    from pylate_fastmaxsim.ops.splade import splade_pool as splade_pool
    from pylate_fastmaxsim.ops.token_pooling import pool_tokens as pool_tokens
    from pylate_fastmaxsim.ops.xtr import xtr_scores as xtr_scores
    from pylate_fastmaxsim.pooling import LogSumExp as LogSumExp
    from pylate_fastmaxsim.pooling import Max as Max
    from pylate_fastmaxsim.pooling import Softmax as Softmax
    from pylate_fastmaxsim.pooling import TopK as TopK
    from pylate_fastmaxsim.precompile.processes import warmup as warmup
    from pylate_fastmaxsim.precompile.shapes import BatchShape as BatchShape
    from pylate_fastmaxsim.retrieval.plaid import read_plaid as read_plaid
    from pylate_fastmaxsim.retrieval.plaid_writer import write_plaid as write_plaid
    from pylate_fastmaxsim.retrieval.sparse.index import SparseIndex as SparseIndex
    from pylate_fastmaxsim.retrieval.sparse.search import sparse_search as sparse_search
    from pylate_fastmaxsim.retrieval.static.model import StaticLateInteraction as StaticLateInteraction
    from pylate_fastmaxsim.retrieval.static.tokens import BM25 as BM25
    from pylate_fastmaxsim.sparse import SparseBatch as SparseBatch

__version__ = "0.2.0"

# Loaded on first use: `enable` imports PyLate, and `import pylate_fastmaxsim` should not.
_NAMES = {
    "compressed": ("CompressedBatch", "compress"),
    "codec": ("ResidualCodec",),
    "retrieval.plaid": ("read_plaid",),
    "retrieval.plaid_writer": ("write_plaid",),
    "sparse": ("SparseBatch",),
    "retrieval.sparse.index": ("SparseIndex",),
    "retrieval.sparse.search": ("sparse_search",),
    "retrieval.static.model": ("StaticLateInteraction",),
    "retrieval.static.tokens": ("BM25",),
    "ops.maxsim": ("maxsim",),
    "ops.projection": ("maxsim_from_hidden",),
    "ops.xtr": ("xtr_scores",),
    "ops.splade": ("splade_pool",),
    "ops.pooled": ("pooled_scores",),
    "ops.score_metric": ("PooledScores",),
    "ops.token_pooling": ("pool_tokens",),
    "pooling": ("Max", "TopK", "Softmax", "LogSumExp"),
    "losses.encode": ("encode",),
    "precompile.processes": ("warmup",),
    "precompile.shapes": ("BatchShape",),
    "integrations.enable": ("enable", "disable", "enabled", "status"),
}
_MODULES = {name: f"pylate_fastmaxsim.{module}" for module, names in _NAMES.items() for name in names}

__all__ = ["TokenBatch", "__version__", *_MODULES]


if not TYPE_CHECKING:  # to which every name would be there

    def __getattr__(name: str):
        if name not in _MODULES:
            raise AttributeError(f"module 'pylate_fastmaxsim' has no attribute {name!r}")
        # So that it is asked for once.
        value = globals()[name] = getattr(importlib.import_module(_MODULES[name]), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
