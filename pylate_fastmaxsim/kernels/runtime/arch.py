"""GPU architectures, the arithmetic of float32 products, and how tile tables are looked up."""

import functools
from typing import NamedTuple

import torch

# The most registers that a thread can have. With None ptxas may choose fewer, so that one more block fits on a
# multiprocessor, and spill for that.
ALL_REGISTERS = 255

# Rows of the tile tables. 86 stands for sm_86 and sm_89; 86 and 120 have less shared memory for a program.
ARCHITECTURES = (80, 86, 90, 100, 120)

# How float32 is multiplied (see primitives/matmul.py) under each float32_matmul_precision.
INPUT_PRECISION = {"highest": "bf16x6", "high": "bf16x3", "medium": "tf32"}


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def arithmetic(dtype: torch.dtype, precision: str) -> str:
    """Key of the tile tables: ``"half"`` for 16-bit vectors, otherwise how float32 is multiplied."""
    return INPUT_PRECISION[precision] if dtype == torch.float32 else "half"


@functools.cache
def architecture(device: torch.device) -> int:
    """Key of the tile tables: the newest architecture of `ARCHITECTURES` that is not newer than the GPU."""
    if device.type != "cuda":
        return ARCHITECTURES[0]
    major, minor = torch.cuda.get_device_capability(device)
    return max((known for known in ARCHITECTURES if known <= 10 * major + minor), default=ARCHITECTURES[0])


# Typed, since tiles of two kernels may be equal tuples.
@functools.lru_cache(maxsize=1024, typed=True)
def launch_options(tile: NamedTuple) -> dict[str, int | None]:
    """The constants of a kernel (`block_...`) and the options of Triton among the fields of a tile; not to be changed."""
    options = {"num_warps": "num_warps", "num_stages": "num_stages", "max_registers": "maxnreg"}
    fields = tile._asdict().items()
    return {
        options.get(name, name.upper()): value for name, value in fields if name in options or name.startswith("block")
    }


def table_row(table: dict, arch: int, kind: str, dim: int):
    """The tiles of a table for vectors of `dim` numbers, or None.

    Keys are (architecture, arithmetic), or the arithmetic alone for all architectures. Values are lists of (largest d,
    tiles) in ascending order; None stands for any d. An architecture's own rows come first and may end before the
    largest d.
    """
    rows = [*table.get((arch, kind), []), *table.get(kind, [])]
    return next((tiles for largest, tiles in rows if largest is None or dim <= largest), None)


def shrunk(tiles: NamedTuple, **sizes: int):
    """Tiles whose blocks, by name, are no longer than the power of 2 that holds a size; at least 16."""
    blocks = {name: max(16, min(getattr(tiles, name), next_power_of_2(size))) for name, size in sizes.items()}
    return tiles._replace(**blocks)
