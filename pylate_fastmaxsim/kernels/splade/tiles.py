"""Tile sizes of SPLADE's kernels, from tables: by GPU architecture, arithmetic and size d of a hidden state."""

import functools
from typing import NamedTuple

from pylate_fastmaxsim.kernels.runtime.arch import ALL_REGISTERS, shrunk, table_row


class MaximaTiles(NamedTuple):
    """`block_m` vocabulary rows by `block_n` slots, `block_k` numbers of a vector at a time.

    `tiles_together` tiles of slots take turns, so that they share vocabulary rows in L2.
    """

    block_m: int
    block_n: int
    block_k: int
    tiles_together: int
    num_warps: int
    num_stages: int
    max_registers: int | None = ALL_REGISTERS


_MAXIMA = {
    (90, "half"): [(None, MaximaTiles(128, 256, 64, 8, 8, 4))],
    (100, "half"): [(None, MaximaTiles(128, 256, 64, 8, 8, 3))],
    (80, "half"): [(None, MaximaTiles(128, 128, 32, 8, 4, 3))],
    **dict.fromkeys([(86, "half"), (120, "half")], [(None, MaximaTiles(128, 64, 32, 8, 4, 3))]),
    **dict.fromkeys([(90, "bf16x6"), (90, "bf16x3")], [(None, MaximaTiles(128, 64, 32, 8, 8, 3))]),
    **dict.fromkeys(("bf16x6", "bf16x3", "tf32"), [(None, MaximaTiles(64, 64, 16, 8, 4, 2))]),
}


@functools.lru_cache(maxsize=256)
def maxima_tiles(arch: int, kind: str, dim: int) -> MaximaTiles:
    return shrunk(table_row(_MAXIMA, arch, kind, dim), block_k=dim)
