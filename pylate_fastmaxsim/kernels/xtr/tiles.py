"""Tile sizes of XTR's own forward, from tables as in maxsim/tiles.py. The backward is that of MaxSim."""

from typing import NamedTuple

from pylate_fastmaxsim.kernels.maxsim.tiles import ForwardTiles, fitted, forward_row
from pylate_fastmaxsim.kernels.runtime.arch import next_power_of_2, table_row


class CollectTiles(NamedTuple):
    """`block_m` query rows by `block_n` document tokens, with the `block_k` of the maxima."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# Of the maxima where MaxSim's forward tiles have too few registers, and of collecting, which uses the maxima's block_k.
_MAXIMA = {(90, "bf16x6"): [(None, ForwardTiles(128, 64, 32, 1, 8, 3))]}
_COLLECT = {
    (90, "half"): [(128, CollectTiles(64, 32, 4, 3)), (None, CollectTiles(64, 64, 4, 2))],
    "half": [(128, CollectTiles(128, 64, 8, 3)), (None, CollectTiles(64, 64, 4, 2))],
    **dict.fromkeys(
        [(arch, kind) for arch in (90, 100) for kind in ("tf32", "bf16x3", "bf16x6")],
        [(128, CollectTiles(128, 64, 8, 2)), (None, CollectTiles(64, 32, 4, 2))],
    ),
    **dict.fromkeys(("tf32", "bf16x3", "bf16x6"), [(None, CollectTiles(64, 32, 4, 2))]),
}


def maxima_tiles(arch: int, kind: str, dim: int, rows_in_all: int) -> ForwardTiles:
    """Tiles of the maxima for `rows_in_all` query rows."""
    # Never the tiles for few rows: maxima are compared bit by bit with collected similarities, and fewer than 64 rows
    # use other matrix instructions.
    return fitted(table_row(_MAXIMA, arch, kind, dim) or forward_row(arch, kind, dim, True, 1), arch, dim, rows_in_all)


def collect_tiles(arch: int, kind: str, dim: int, rows_in_all: int) -> CollectTiles:
    """Tiles of collecting for `rows_in_all` query rows."""
    tiles = table_row(_COLLECT, arch, kind, dim)
    block_m = max(64, min(tiles.block_m, next_power_of_2(rows_in_all)))
    return tiles._replace(block_m=block_m, num_warps=max(4, tiles.num_warps * block_m // tiles.block_m))
