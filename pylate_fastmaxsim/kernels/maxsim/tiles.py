"""Tile sizes of the kernels of MaxSim and XTR, from tables: by GPU architecture, arithmetic and size of a token vector.

Those of the projection are in head_tiles.py.
"""

import functools
from typing import NamedTuple

import torch

from pylate_fastmaxsim.kernels.runtime.triton_version import RELEASE

# The most that a thread can have. Left to itself (None), ptxas may allow itself fewer, to fit one more block on a
# multiprocessor, and spill a few values for that.
ALL_REGISTERS = 255


class ForwardTiles(NamedTuple):
    """`block_m` query rows by `block_n` document tokens, `block_k` numbers of a vector at a time."""

    block_m: int
    block_n: int
    block_k: int
    documents_per_program: int
    num_warps: int
    num_stages: int
    max_registers: int | None = ALL_REGISTERS


class QueryGradientTiles(NamedTuple):
    """`block_rows` query rows by `block_d` numbers of a vector, with `unroll` documents in flight."""

    block_rows: int
    block_d: int
    unroll: int
    num_warps: int


class DocumentGradientTiles(NamedTuple):
    """`block_t` tokens of a document by `block_d` numbers of a vector, `block_r` query rows at a time.

    The counting sort before takes chunks of `block_scan` rows, by programs of `scan_warps`.
    """

    block_t: int
    block_r: int
    block_d: int
    block_scan: int
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


class CollectTiles(NamedTuple):
    """`block_m` query rows by `block_n` document tokens, with the `block_k` of the maxima."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


class Tiles(NamedTuple):
    """One of each family; `None` means: take it from the tables."""

    forward: ForwardTiles | None = None
    query_gradient: QueryGradientTiles | None = None
    document_gradient: DocumentGradientTiles | None = None
    candidate_gradient: CandidateGradientTiles | None = None


FROM_TABLES = Tiles()


class XtrTiles(NamedTuple):
    """Of XTR's own forward; `None` means: take it from the tables. The backward is that of MaxSim."""

    forward: ForwardTiles | None = None
    collect: CollectTiles | None = None


XTR_FROM_TABLES = XtrTiles()


# How float32 is multiplied (see products.py) under each float32_matmul_precision; 16-bit operands are as they are.
INPUT_PRECISION = {"highest": "bf16x6", "high": "bf16x3", "medium": "tf32"}
# 86 (for sm_86 and sm_89) and 120 are GPUs with less shared memory for a program.
ARCHITECTURES = (80, 86, 90, 100, 120)

# (architecture, arithmetic), or the arithmetic alone for every architecture without a row of its own ->
# (largest d, tiles); the last row is for any larger d. block_k and block_d shrink to fit d.
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
# Where there are no more query rows than such a tile has: programs of one warp, of which more fit on a multiprocessor,
# so that more bytes are on their way. These shapes are bound by memory.
_FORWARD_OF_FEW_ROWS = {(90, "half"): [(128, ForwardTiles(32, 32, 128, 1, 1, 3))]}
# Where winners are wanted as well, rows that come before those above; and before these, rows for queries that fill a
# tile alone, which have more to keep in registers.
_FORWARD_WITH_WINNERS = {
    (90, "half"): [
        (64, ForwardTiles(256, 64, 64, 8, 8, 2, 128)),
        (128, ForwardTiles(256, 64, 128, 8, 8, 3, 128)),
        (256, ForwardTiles(256, 64, 256, 8, 8, 3)),
    ]
}
_FORWARD_OF_LONG_QUERIES_WITH_WINNERS = {(90, "half"): [(128, ForwardTiles(256, 64, 128, 8, 8, 2, 128))]}
# Of XTR's maxima where those of the forward have too few registers, and of its collecting, which shares block_k with
# them.
_XTR_MAXIMA = {(90, "bf16x6"): [(None, ForwardTiles(128, 64, 32, 1, 8, 3))]}
_COLLECT = {
    (90, "half"): [(128, CollectTiles(64, 32, 4, 3)), (None, CollectTiles(64, 64, 4, 2))],
    "half": [(128, CollectTiles(128, 64, 8, 3)), (None, CollectTiles(64, 64, 4, 2))],
    **dict.fromkeys(
        [(arch, kind) for arch in (90, 100) for kind in ("tf32", "bf16x3", "bf16x6")],
        [(128, CollectTiles(128, 64, 8, 2)), (None, CollectTiles(64, 32, 4, 2))],
    ),
    **dict.fromkeys(("tf32", "bf16x3", "bf16x6"), [(None, CollectTiles(64, 32, 4, 2))]),
}
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


# Query rows of the programs of a launch: several programs for each multiprocessor of the largest GPU, one after the
# other, so that none is idle at the end. Two programs of 256 rows fill a multiprocessor, so that half as many rows are
# all programs at once.
_ENOUGH_ROWS = 2**17


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def arithmetic(dtype: torch.dtype, precision: str) -> str:
    """Name of the matrix arithmetic: half, or how float32 is multiplied."""
    return INPUT_PRECISION[precision] if dtype == torch.float32 else "half"


@functools.cache
def architecture(device: torch.device) -> int:
    """Table row of a GPU: the newest known architecture that is not newer than it."""
    if device.type != "cuda":
        return ARCHITECTURES[0]
    major, minor = torch.cuda.get_device_capability(device)
    return max((known for known in ARCHITECTURES if known <= 10 * major + minor), default=ARCHITECTURES[0])


def row(table: dict, arch: int, kind: str, dim: int):
    """A table's tiles for vectors of `dim` numbers, the architecture's own before those of all; None: it has none."""
    # An architecture's own rows need not reach to the largest d.
    rows = [*table.get((arch, kind), []), *table.get(kind, [])]
    return next((tiles for largest, tiles in rows if largest is None or dim <= largest), None)


@functools.lru_cache(maxsize=256)
def forward_tiles(
    arch: int, kind: str, dim: int, rows_in_all: int, want_winners: bool, longest_query: int = 1
) -> ForwardTiles:
    """Tiles of the forward; `rows_in_all` query rows share tiles, and a query has at most `longest_query` of them."""
    tiles = row(_FORWARD_OF_FEW_ROWS, arch, kind, dim)
    if tiles is None or rows_in_all > tiles.block_m:
        tiles = _forward_row(arch, kind, dim, want_winners, longest_query)
    return _fitted(tiles, arch, dim, rows_in_all)


def _forward_row(arch: int, kind: str, dim: int, want_winners: bool, longest_query: int) -> ForwardTiles:
    tiles = row(_FORWARD, arch, kind, dim)
    if want_winners:
        tiles = row(_FORWARD_WITH_WINNERS, arch, kind, dim) or tiles
        if longest_query >= tiles.block_m:
            tiles = row(_FORWARD_OF_LONG_QUERIES_WITH_WINNERS, arch, kind, dim) or tiles
    return tiles


def xtr_maxima_tiles(arch: int, kind: str, dim: int, rows_in_all: int) -> ForwardTiles:
    """Tiles of XTR's maxima; `rows_in_all` is how many query rows there are to share a tile."""
    # Not the tiles of few rows: XTR compares these similarities bit by bit with those that it collects, and fewer than
    # 64 rows go to other matrix instructions.
    return _fitted(row(_XTR_MAXIMA, arch, kind, dim) or _forward_row(arch, kind, dim, True, 1), arch, dim, rows_in_all)


def _fitted(tiles: ForwardTiles, arch: int, dim: int, rows_in_all: int) -> ForwardTiles:
    # The matrix units of sm_90 and sm_100 take 64 rows; fewer go to older and slower instructions, so only a table says
    # so.
    fewest_rows = min(tiles.block_m, 64 if arch in (90, 100) else 16)
    block_m = max(fewest_rows, min(tiles.block_m, next_power_of_2(rows_in_all)))
    block_k = max(16, min(tiles.block_k, next_power_of_2(dim)))
    # To so few rows that they wait for memory, where more programs at a time help more than more loads of each.
    shrunk = block_m < tiles.block_m and block_m <= 64 and dim <= tiles.block_k
    # Earlier releases use 64 KiB of shared memory more, which beside the largest tiles leaves room for one stage.
    if RELEASE < (3, 4) and tiles.block_m * block_k > 256 * 128:
        tiles = tiles._replace(num_stages=1)
    return tiles._replace(
        block_m=block_m,
        block_k=block_k,
        # As many rows for each warp as in the table, but at least the four warps that one matrix instruction takes.
        num_warps=min(tiles.num_warps, max(4, tiles.num_warps * block_m // tiles.block_m)),
        num_stages=min(tiles.num_stages, 2) if shrunk else tiles.num_stages,
        max_registers=tiles.max_registers if block_m == tiles.block_m else ALL_REGISTERS,
    )


def collect_tiles(arch: int, kind: str, dim: int, rows_in_all: int) -> CollectTiles:
    """Tiles of XTR's collecting; `rows_in_all` is how many query rows there are to share a tile."""
    tiles = row(_COLLECT, arch, kind, dim)
    block_m = max(64, min(tiles.block_m, next_power_of_2(rows_in_all)))
    return tiles._replace(block_m=block_m, num_warps=max(4, tiles.num_warps * block_m // tiles.block_m))


def documents_per_program(tiles: ForwardTiles, num_tiles: int, num_slots: int) -> int:
    """Documents that a program takes in turn: as the table says, but fewer where the GPU would run out of programs."""
    # The forward holds the scores of no more than 8.
    count = min(tiles.documents_per_program, 8)
    enough = _ENOUGH_ROWS // 2 if tiles.block_m >= 256 else _ENOUGH_ROWS
    while count > 1 and tiles.block_m * num_tiles * cdiv(num_slots, count) < enough:
        count //= 2
    return count


@functools.lru_cache(maxsize=256)
def query_gradient_tiles(arch: int, kind: str, dim: int) -> QueryGradientTiles:
    tiles = row(_QUERY_GRADIENT, arch, kind, dim)
    return tiles._replace(block_d=min(tiles.block_d, next_power_of_2(dim)))


@functools.lru_cache(maxsize=256)
def document_gradient_tiles(arch: int, kind: str, dim: int) -> DocumentGradientTiles:
    tiles = row(_DOCUMENT_GRADIENT, arch, kind, dim)
    return tiles._replace(block_d=max(16, min(tiles.block_d, next_power_of_2(dim))))


@functools.lru_cache(maxsize=256)
def candidate_gradient_tiles(arch: int, kind: str, dim: int) -> CandidateGradientTiles:
    tiles = row(_CANDIDATE_GRADIENT, arch, kind, dim)
    return tiles._replace(block_d=max(16, min(tiles.block_d, next_power_of_2(dim))))
