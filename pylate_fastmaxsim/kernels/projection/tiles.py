"""Tile sizes of the projection's kernels, from tables as in maxsim/tiles.py."""

from typing import NamedTuple

from pylate_fastmaxsim.kernels.runtime.arch import cdiv, shrunk, table_row
from pylate_fastmaxsim.kernels.runtime.cached_launch import RELEASE

# Programs of a launch of the weight's gradient: a few for each multiprocessor of the largest GPU.
ENOUGH_PROGRAMS = 264
# Rows of a part of the weight's gradient: enough that writing and summing the parts costs little.
FEWEST_ROWS = 512


class ProjectionTiles(NamedTuple):
    """Tiles of project_kernel and hidden_gradient_kernel."""

    block_t: int
    block_d: int
    block_k: int
    num_warps: int
    num_stages: int


class WeightGradientTiles(NamedTuple):
    """`block_d` by `block_k` numbers of the weight's gradient, `block_r` rows of hidden states at a time."""

    block_r: int
    block_d: int
    block_k: int
    num_warps: int
    num_stages: int


_FLOAT32 = ("tf32", "bf16x3", "bf16x6")
# By d_out.
_PROJECT = {
    "half": [
        (128, ProjectionTiles(128, 128, 64, 8, 3)),
        (None, ProjectionTiles(64, 256, 32, 8, 3)),
    ],
    **dict.fromkeys(_FLOAT32, [(None, ProjectionTiles(64, 128, 32, 8, 2))]),
}
_HIDDEN_GRADIENT = {
    (90, "half"): [(128, ProjectionTiles(64, 128, 64, 8, 3)), (None, ProjectionTiles(64, 128, 128, 8, 2))],
    "half": [(None, ProjectionTiles(64, 128, 128, 8, 2))],
    **dict.fromkeys(_FLOAT32, [(128, ProjectionTiles(32, 128, 32, 8, 2)), (None, ProjectionTiles(32, 64, 32, 8, 2))]),
    (86, "bf16x6"): [(None, ProjectionTiles(32, 64, 32, 8, 2))],
}
_WEIGHT_GRADIENT = {
    (90, "half"): [(None, WeightGradientTiles(64, 128, 128, 8, 3))],
    "half": [(None, WeightGradientTiles(64, 128, 128, 8, 2))],
    **{(arch, "half"): [(None, WeightGradientTiles(32, 64, 128, 8, 2))] for arch in (80, 86, 120)},
    **dict.fromkeys(_FLOAT32, [(None, WeightGradientTiles(32, 64, 64, 8, 2))]),
    (80, "bf16x6"): [(None, WeightGradientTiles(32, 32, 64, 8, 2))],
}


def project_tiles(arch: int, kind: str, dim_in: int, dim_out: int) -> ProjectionTiles:
    return shrunk(table_row(_PROJECT, arch, kind, dim_out), block_d=dim_out, block_k=dim_in)


def hidden_gradient_tiles(arch: int, kind: str, dim_in: int, dim_out: int) -> ProjectionTiles:
    tiles = shrunk(table_row(_HIDDEN_GRADIENT, arch, kind, dim_out), block_d=dim_out, block_k=dim_in)
    # This release cannot pipeline loads of 16-bit gradients in the loop over parts of d.
    if RELEASE == (3, 5) and kind == "half" and dim_out > tiles.block_d:
        tiles = tiles._replace(num_stages=1)
    return tiles


def weight_gradient_tiles(arch: int, kind: str, dim_in: int, dim_out: int) -> WeightGradientTiles:
    return shrunk(table_row(_WEIGHT_GRADIENT, arch, kind, dim_out), block_d=dim_out, block_k=dim_in)


def rows_per_part(tiles: WeightGradientTiles, num_rows: int, num_tiles: int) -> int:
    """Rows of a program of the weight's gradient. It depends on sizes only, so that sums repeat bit by bit."""
    parts = max(1, min(cdiv(num_rows, FEWEST_ROWS), ENOUGH_PROGRAMS // num_tiles))
    return cdiv(num_rows, parts * tiles.block_r) * tiles.block_r
