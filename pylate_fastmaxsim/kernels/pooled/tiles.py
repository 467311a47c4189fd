"""Tile sizes of the pooling kernels, from tables: by GPU architecture, arithmetic and size d of a token vector."""

import functools
from typing import NamedTuple

import torch

from pylate_fastmaxsim.kernels.maxsim.tiles import ForwardTiles, fitted
from pylate_fastmaxsim.kernels.runtime.arch import ALL_REGISTERS, arithmetic, shrunk, table_row


class QueryGradientTiles(NamedTuple):
    """`block_m` query rows by `block_n` tokens, `block_k` numbers of a vector in a product, `block_d` of the gradient."""

    block_m: int
    block_n: int
    block_k: int
    block_d: int
    num_warps: int
    num_stages: int
    max_registers: int | None = ALL_REGISTERS


class DocumentGradientTiles(NamedTuple):
    """`block_t` tokens of a document by `block_r` query rows, and the vector as above."""

    block_t: int
    block_r: int
    block_k: int
    block_d: int
    num_warps: int
    num_stages: int
    max_registers: int | None = ALL_REGISTERS


class PooledTiles(NamedTuple):
    """Tiles of each family of kernels; None: those of the tables."""

    forward: ForwardTiles | None = None
    query_gradient: QueryGradientTiles | None = None
    document_gradient: DocumentGradientTiles | None = None


FROM_TABLES = PooledTiles()

_SMOOTH_FORWARD = {
    (90, "half"): [(128, ForwardTiles(64, 64, 128, 8, 4, 3)), (None, ForwardTiles(128, 64, 64, 4, 8, 3))],
    (100, "half"): [(128, ForwardTiles(128, 64, 128, 1, 4, 3)), (None, ForwardTiles(128, 64, 64, 1, 8, 3))],
    (80, "half"): [(128, ForwardTiles(128, 64, 128, 1, 8, 2)), (None, ForwardTiles(128, 64, 32, 1, 8, 2))],
    "half": [(128, ForwardTiles(64, 64, 128, 1, 4, 2)), (None, ForwardTiles(32, 32, 32, 1, 4, 3))],
    (90, "bf16x6"): [(128, ForwardTiles(128, 64, 128, 2, 8, 2)), (None, ForwardTiles(128, 64, 32, 1, 8, 3))],
    **dict.fromkeys(("bf16x6", "bf16x3", "tf32"), [(None, ForwardTiles(64, 32, 16, 1, 4, 2))]),
}
_TOP_FEW_FORWARD = _SMOOTH_FORWARD | {
    (90, "half"): [(128, ForwardTiles(64, 64, 128, 8, 4, 3, 168)), (None, ForwardTiles(128, 64, 64, 4, 8, 3))],
    (100, "half"): [(128, ForwardTiles(128, 64, 128, 1, 8, 3)), (None, ForwardTiles(128, 64, 64, 1, 8, 3))],
}
_TOP_MANY_FORWARD = {
    "half": [(None, ForwardTiles(64, 64, 64, 1, 4, 2))],
    **dict.fromkeys(("bf16x6", "bf16x3", "tf32"), [(None, ForwardTiles(64, 64, 16, 1, 8, 2))]),
}
# Of the gradients fp16 has rows of its own: its weights are the sum of two bf16, and take three products.
_QUERY_GRADIENT = {
    (90, "half"): [
        (128, QueryGradientTiles(64, 64, 128, 128, 4, 2, 168)),
        (None, QueryGradientTiles(128, 64, 64, 128, 8, 3)),
    ],
    **dict.fromkeys(("half", "fp16"), [(None, QueryGradientTiles(64, 32, 64, 64, 4, 2))]),
    **dict.fromkeys(("bf16x6", "bf16x3", "tf32"), [(None, QueryGradientTiles(64, 32, 32, 64, 8, 2))]),
}
_DOCUMENT_GRADIENT = {
    (90, "half"): [
        (128, DocumentGradientTiles(64, 64, 128, 128, 4, 3)),
        (None, DocumentGradientTiles(64, 64, 64, 128, 4, 3)),
    ],
    **dict.fromkeys(("half", "fp16"), [(None, DocumentGradientTiles(64, 32, 64, 64, 4, 2))]),
    **dict.fromkeys(("bf16x6", "bf16x3", "tf32"), [(None, DocumentGradientTiles(64, 32, 32, 64, 8, 2))]),
}


@functools.lru_cache(maxsize=256)
def forward_tiles(arch: int, kind: str, dim: int, rows_in_all: int, k: int) -> ForwardTiles:
    """Tiles of the forward for `rows_in_all` query rows; k = 0: of the smooth poolings."""
    table = _SMOOTH_FORWARD if k == 0 else _TOP_FEW_FORWARD if k <= MOST_OF_FEW else _TOP_MANY_FORWARD
    return fitted(table_row(table, arch, kind, dim), arch, dim, rows_in_all)


# Up to so many winners of a row are kept in order as they come; more are sorted.
MOST_OF_FEW = 4


def gradient_kind(dtype: torch.dtype, precision: str) -> str:
    """Key of the tables of gradients."""
    return "fp16" if dtype == torch.float16 else arithmetic(dtype, precision)


@functools.lru_cache(maxsize=256)
def query_gradient_tiles(arch: int, kind: str, dim: int, few_registers: bool) -> QueryGradientTiles:
    """`few_registers`: softmax pooling without masks and candidates. Others would spill with as few as the table has."""
    tiles = _fitted(table_row(_QUERY_GRADIENT, arch, kind, dim), dim)
    return tiles if few_registers else tiles._replace(max_registers=ALL_REGISTERS)


@functools.lru_cache(maxsize=256)
def document_gradient_tiles(arch: int, kind: str, dim: int, of_candidates: bool) -> DocumentGradientTiles:
    tiles = _fitted(table_row(_DOCUMENT_GRADIENT, arch, kind, dim), dim)
    # The rows of one query at a time, of which there are seldom more.
    return tiles._replace(block_r=32) if of_candidates else tiles


def _fitted(tiles, dim: int):
    """A vector that fits into one chunk of a product is loaded once for it and for the gradient."""
    tiles = shrunk(tiles, block_k=dim, block_d=dim)
    return tiles._replace(block_d=tiles.block_k) if dim <= tiles.block_k else tiles
