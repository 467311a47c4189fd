"""Tile sizes of compressed documents, from tables: by GPU architecture, format and size d of a token vector."""

import functools

from pylate_fastmaxsim.kernels.maxsim.tiles import ForwardTiles, fitted
from pylate_fastmaxsim.kernels.runtime.arch import next_power_of_2, table_row

# Looked up by table_row. block_k shrinks to fit d.
_FORWARD = {
    (90, "int8"): [(256, ForwardTiles(256, 64, 256, 8, 8, 3, 128)), (None, ForwardTiles(128, 64, 128, 4, 8, 3))],
    (90, "int8 by token"): [
        (256, ForwardTiles(128, 64, 256, 8, 4, 3, 128)),
        (None, ForwardTiles(128, 64, 128, 4, 8, 3)),
    ],
    (90, "fp8"): [(256, ForwardTiles(128, 64, 256, 8, 4, 3, 128)), (None, ForwardTiles(128, 64, 128, 4, 8, 3))],
    **dict.fromkeys(
        ["int8", "int8 by token", "fp8"],
        [(128, ForwardTiles(128, 64, 128, 4, 8, 2)), (None, ForwardTiles(64, 64, 128, 2, 4, 2))],
    ),
    # More stages than one would hold the look-ups of several tiles, which wait for each other.
    "residual": [(128, ForwardTiles(64, 64, 128, 8, 4, 1)), (None, ForwardTiles(64, 32, 256, 4, 4, 1))],
}
# For launches with at most this many query rows, which are bound by memory.
_FORWARD_OF_FEW_ROWS = {
    (90, "int8"): [(128, ForwardTiles(64, 64, 128, 4, 4, 3))],
    (90, "int8 by token"): [(128, ForwardTiles(64, 64, 128, 4, 4, 3))],
    (90, "fp8"): [(128, ForwardTiles(64, 64, 128, 1, 4, 3))],
    (90, "residual"): [(128, ForwardTiles(64, 64, 128, 8, 4, 1, 128))],
}
# The fused kernel holds whole vectors of residual codes.
LARGEST_FUSED_DIM = 256
# Up to so many query rows decompressing in the tile costs less than writing vectors and reading them again.
_FUSED_ROWS = 128


@functools.lru_cache(maxsize=256)
def forward_tiles(arch: int, kind: str, dim: int, rows_in_all: int) -> ForwardTiles:
    """Tiles of the forward for `rows_in_all` query rows that share their documents."""
    tiles = table_row(_FORWARD_OF_FEW_ROWS, arch, kind, dim)
    if tiles is None or rows_in_all > tiles.block_m:
        tiles = table_row(_FORWARD, arch, kind, dim)
    tiles = fitted(tiles, arch, dim, rows_in_all)
    # The least that instructions of 8 bits take, and of 16 bits after decompression.
    return tiles._replace(block_k=max(tiles.block_k, 32))


def is_fused(rows_in_all: int, dim: int, of_16_bits: bool) -> bool:
    """Say whether residual codes are decompressed in the tiles of the forward rather than in a kernel before it."""
    return of_16_bits and dim <= LARGEST_FUSED_DIM and rows_in_all <= _FUSED_ROWS


def gradient_rows(dim: int) -> int:
    """Query rows of a program of the query gradient."""
    return max(1, min(16, 1024 // next_power_of_2(dim)))
