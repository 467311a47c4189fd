"""Tile sizes of MaxSim's forward, from tables: by GPU architecture, arithmetic and size d of a token vector."""

import functools
from typing import NamedTuple

from pylate_fastmaxsim.kernels.runtime.arch import ALL_REGISTERS, cdiv, next_power_of_2, table_row
from pylate_fastmaxsim.kernels.runtime.cached_launch import RELEASE


class ForwardTiles(NamedTuple):
    """`block_m` query rows by `block_n` document tokens, `block_k` numbers of a vector at a time."""

    block_m: int
    block_n: int
    block_k: int
    documents_per_program: int
    num_warps: int
    num_stages: int
    max_registers: int | None = ALL_REGISTERS


# Looked up by table_row. block_k shrinks to fit d.
_FORWARD = {
    (80, "half"): [
        (128, ForwardTiles(128, 64, 128, 1, 8, 2)),
        (256, ForwardTiles(128, 64, 256, 1, 8, 2)),
        (None, ForwardTiles(128, 64, 32, 1, 8, 2)),
    ],
    (90, "half"): [
        (128, ForwardTiles(256, 64, 128, 8, 8, 3, 128)),
        (256, ForwardTiles(256, 64, 256, 8, 8, 2, None)),
        (None, ForwardTiles(256, 64, 64, 4, 8, 4)),
    ],
    (100, "half"): [
        (128, ForwardTiles(128, 64, 128, 1, 4, 3)),
        (256, ForwardTiles(128, 64, 256, 1, 8, 2)),
        (None, ForwardTiles(128, 64, 64, 1, 8, 3)),
    ],
    **dict.fromkeys(
        [(86, "half"), (120, "half")],
        [(128, ForwardTiles(64, 64, 128, 1, 4, 2)), (None, ForwardTiles(32, 32, 32, 1, 4, 3))],
    ),
    **dict.fromkeys([(80, "bf16x6"), (86, "bf16x6"), (120, "bf16x6")], [(None, ForwardTiles(64, 32, 16, 1, 4, 2))]),
    **dict.fromkeys([(80, "bf16x3"), (86, "bf16x3"), (120, "bf16x3")], [(None, ForwardTiles(32, 64, 16, 1, 4, 2))]),
    **dict.fromkeys([(80, "tf32"), (86, "tf32"), (120, "tf32")], [(None, ForwardTiles(64, 64, 16, 1, 8, 2))]),
    (90, "bf16x6"): [(128, ForwardTiles(128, 64, 128, 2, 8, 2)), (None, ForwardTiles(128, 64, 32, 1, 8, 3))],
    (100, "bf16x6"): [(128, ForwardTiles(128, 64, 64, 1, 8, 2)), (None, ForwardTiles(128, 64, 32, 1, 8, 2))],
    "bf16x3": [(128, ForwardTiles(128, 64, 128, 2, 8, 2)), (None, ForwardTiles(128, 64, 32, 1, 8, 3))],
    "tf32": [(None, ForwardTiles(64, 64, 32, 1, 8, 2))],
}
# Tokens of the longest document for which tiles of as many are looked up first, where no winners are wanted: most of a
# tile of 64 would be empty.
SHORT_DOCUMENT = 32
_FORWARD_OF_SHORT_DOCUMENTS = {(90, "half"): [(128, ForwardTiles(256, 32, 128, 8, 8, 3, 128))]}
# For launches with at most this many query rows, which are bound by memory: more programs of one warp fit on a
# multiprocessor, and so more loads are in flight.
_FORWARD_OF_FEW_ROWS = {(90, "half"): [(128, ForwardTiles(32, 32, 128, 1, 1, 3))]}
# Looked up first where winners are wanted; for queries that fill a tile alone, which need more registers, the second
# table comes before the first.
_FORWARD_WITH_WINNERS = {
    (90, "half"): [
        (64, ForwardTiles(256, 64, 64, 8, 8, 2, 128)),
        (128, ForwardTiles(256, 64, 128, 8, 8, 3, 128)),
        (256, ForwardTiles(256, 64, 256, 8, 8, 3)),
    ]
}
_FORWARD_OF_LONG_QUERIES_WITH_WINNERS = {(90, "half"): [(128, ForwardTiles(256, 64, 128, 8, 8, 2, 128))]}


# Query rows of all programs of a launch: several programs in turn for each multiprocessor of the largest GPU, so that
# none idles at the end. With tiles of 256 rows half as many are enough, since two programs fill a multiprocessor.
ENOUGH_ROWS = 2**17


@functools.lru_cache(maxsize=256)
def forward_tiles(
    arch: int,
    kind: str,
    dim: int,
    rows_in_all: int,
    want_winners: bool,
    longest_query: int = 1,
    short_documents: bool = False,
) -> ForwardTiles:
    """Tiles of the forward for `rows_in_all` query rows; the longest query has `longest_query` of them."""
    tiles = table_row(_FORWARD_OF_FEW_ROWS, arch, kind, dim)
    if tiles is None or rows_in_all > tiles.block_m:
        tiles = forward_row(arch, kind, dim, want_winners, longest_query)
        if short_documents and not want_winners:
            tiles = table_row(_FORWARD_OF_SHORT_DOCUMENTS, arch, kind, dim) or tiles
    return fitted(tiles, arch, dim, rows_in_all)


def forward_row(arch: int, kind: str, dim: int, want_winners: bool, longest_query: int) -> ForwardTiles:
    tiles = table_row(_FORWARD, arch, kind, dim)
    if want_winners:
        tiles = table_row(_FORWARD_WITH_WINNERS, arch, kind, dim) or tiles
        if longest_query >= tiles.block_m:
            tiles = table_row(_FORWARD_OF_LONG_QUERIES_WITH_WINNERS, arch, kind, dim) or tiles
    return tiles


def fitted(tiles: ForwardTiles, arch: int, dim: int, rows_in_all: int) -> ForwardTiles:
    # The matrix units of sm_90 and sm_100 take 64 rows. Fewer use slower instructions, which only a table may choose.
    fewest_rows = min(tiles.block_m, 64 if arch in (90, 100) else 16)
    block_m = max(fewest_rows, min(tiles.block_m, next_power_of_2(rows_in_all)))
    block_k = max(16, min(tiles.block_k, next_power_of_2(dim)))
    # With so few rows the kernel waits for memory, and more programs help more than more stages.
    shrunk = block_m < tiles.block_m and block_m <= 64 and dim <= tiles.block_k
    # Earlier releases use 64 KiB more of shared memory, so that the largest tiles fit with one stage only.
    if RELEASE < (3, 4) and tiles.block_m * block_k > 256 * 128:
        tiles = tiles._replace(num_stages=1)
    return tiles._replace(
        block_m=block_m,
        block_k=block_k,
        # As many rows a warp as in the table, but at least the four warps of a matrix instruction.
        num_warps=min(tiles.num_warps, max(4, tiles.num_warps * block_m // tiles.block_m)),
        num_stages=min(tiles.num_stages, 2) if shrunk else tiles.num_stages,
        max_registers=tiles.max_registers if block_m == tiles.block_m else ALL_REGISTERS,
    )


def documents_per_program(tiles: ForwardTiles, num_tiles: int, num_slots: int) -> int:
    """Documents of a program, one after the other: as in the table, but fewer where the GPU would run out of programs."""
    # The forward holds the scores of no more than 8.
    count = min(tiles.documents_per_program, 8)
    enough = ENOUGH_ROWS // 2 if tiles.block_m >= 256 else ENOUGH_ROWS
    while count > 1 and tiles.block_m * num_tiles * cdiv(num_slots, count) < enough:
        count //= 2
    return count
