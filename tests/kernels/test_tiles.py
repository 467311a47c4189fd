"""Tile tables: what a shape gets."""

import pytest

pytest.importorskip("triton")

from pylate_fastmaxsim.kernels.maxsim.tiles import (  # noqa: E402
    document_gradient_tiles,
    forward_tiles,
    query_gradient_tiles,
)
from pylate_fastmaxsim.kernels.xtr.tiles import maxima_tiles  # noqa: E402


def test_tiles_shrink_to_the_input():
    tiles = forward_tiles(90, "half", 48, 33, False)
    assert (tiles.block_m, tiles.block_k, tiles.num_stages) == (64, 64, 2)
    tiles = forward_tiles(90, "half", 48, 5, False)
    assert (tiles.block_m, tiles.block_k, tiles.num_warps, tiles.num_stages) == (32, 64, 1, 3)
    assert maxima_tiles(90, "half", 48, 5).block_m == 64
    assert document_gradient_tiles(90, "half", 7).block_d == 16
    assert query_gradient_tiles(90, "half", 1).block_d == 1
