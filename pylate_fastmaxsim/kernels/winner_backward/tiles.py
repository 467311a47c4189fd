"""Tile sizes of the gradients' kernels, from tables: by GPU architecture, arithmetic and size d of a token vector."""

import functools
from typing import NamedTuple

from pylate_fastmaxsim.kernels.runtime.arch import ALL_REGISTERS, next_power_of_2, shrunk, table_row


class QueryGradientTiles(NamedTuple):
    """`block_rows` query rows by `block_d` numbers of a vector, with `unroll` documents in flight."""

    block_rows: int
    block_d: int
    unroll: int
    num_warps: int


class DocumentGradientTiles(NamedTuple):
    """`block_t` tokens of a document by `block_d` numbers of a vector, `block_r` query rows at a time.

    The counting sort that comes first takes chunks of `rows_of_scan` rows, in programs of `scan_warps` warps.
    """

    block_t: int
    block_r: int
    block_d: int
    rows_of_scan: int
    scan_warps: int
    num_warps: int
    num_stages: int


class CandidateGradientTiles(NamedTuple):
    """`block_t` tokens of a document by `block_d` numbers of a vector, `block_r` query rows at a time."""

    block_t: int
    block_r: int
    block_d: int
    num_warps: int
    num_stages: int
    max_registers: int | None = ALL_REGISTERS


# Looked up by table_row. block_d shrinks to fit d.
_QUERY_GRADIENT = {
    (90, "half"): [(64, QueryGradientTiles(16, 64, 8, 4)), (None, QueryGradientTiles(4, 128, 8, 2))],
    **dict.fromkeys(("half", "tf32", "bf16x3", "bf16x6"), [(None, QueryGradientTiles(4, 128, 8, 2))]),
}
_DOCUMENT_GRADIENT = {
    (90, "half"): [(None, DocumentGradientTiles(16, 64, 128, 1024, 4, 2, 3))],
    "half": [(None, DocumentGradientTiles(32, 32, 128, 1024, 4, 4, 2))],
    **dict.fromkeys(
        ("tf32", "bf16x3", "bf16x6"),
        [
            (128, DocumentGradientTiles(32, 32, 128, 1024, 4, 4, 2)),
            (None, DocumentGradientTiles(16, 32, 128, 1024, 4, 4, 2)),
        ],
    ),
}
_CANDIDATE_GRADIENT = {
    (90, "half"): [(None, CandidateGradientTiles(64, 32, 128, 4, 1, None))],
    "half": [(None, CandidateGradientTiles(32, 32, 128, 4, 2, None))],
    **dict.fromkeys(("tf32", "bf16x3", "bf16x6"), [(None, CandidateGradientTiles(32, 32, 64, 4, 2))]),
}


@functools.lru_cache(maxsize=256)
def query_gradient_tiles(arch: int, kind: str, dim: int) -> QueryGradientTiles:
    tiles = table_row(_QUERY_GRADIENT, arch, kind, dim)
    return tiles._replace(block_d=min(tiles.block_d, next_power_of_2(dim)))


@functools.lru_cache(maxsize=256)
def document_gradient_tiles(arch: int, kind: str, dim: int) -> DocumentGradientTiles:
    return shrunk(table_row(_DOCUMENT_GRADIENT, arch, kind, dim), block_d=dim)


@functools.lru_cache(maxsize=256)
def candidate_gradient_tiles(arch: int, kind: str, dim: int) -> CandidateGradientTiles:
    return shrunk(table_row(_CANDIDATE_GRADIENT, arch, kind, dim), block_d=dim)
