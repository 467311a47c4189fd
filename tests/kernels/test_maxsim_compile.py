"""MaxSim's forward compiles without a GPU, fits the GPUs of the tables, and spills nothing."""

from typing import NamedTuple

import pytest
import torch

pytest.importorskip("triton")

from pylate_fastmaxsim.kernels.maxsim.forward import forward_kernel  # noqa: E402
from pylate_fastmaxsim.kernels.maxsim.plan import VECTORS  # noqa: E402
from pylate_fastmaxsim.kernels.maxsim.tiles import forward_tiles  # noqa: E402
from pylate_fastmaxsim.kernels.primitives.live_rows import live_tokens_kernel  # noqa: E402
from tests.support.compiled import OF_COMPRESSED, OF_SMOOTH, blocks_of, check, compiled, kind, options_of, points  # noqa: E402

pytestmark = pytest.mark.compile

EVERYWHERE = (("bf16", 128), ("bf16x6", 128))
CASES = [*EVERYWHERE, ("bf16", 96), ("bf16", 256), ("bf16", 768), ("fp16", 128)]
CASES += [("bf16x6", 100), ("bf16x6", 768), ("bf16x3", 128), ("tf32", 128)]
MASKS = ("q_keep", "live_tokens", "zero_floor")


class Batch(NamedTuple):
    """What the compiled forward depends on, besides the vectors."""

    rows: int = 4096
    long_queries: bool = False
    candidates: bool = False
    masks: bool = False
    winners: torch.dtype | None = torch.uint8


def compile_forward(arch, operand, dim, batch, directory):
    want_winners = batch.winners is not None
    query_rows = batch.rows if batch.long_queries else 32
    tile = forward_tiles(arch, kind(operand), dim, batch.rows, want_winners, query_rows)
    absent = (() if batch.candidates else ("candidates",)) + (() if batch.masks else MASKS)
    absent += (() if want_winners else ("winners",)) + OF_COMPRESSED + OF_SMOOTH
    one_query = batch.candidates or batch.long_queries
    constants = {"DIM": dim, "ROWS_PER_QUERY": 32, "ONE_QUERY": one_query, "WANT_WINNERS": want_winners}
    constants |= VECTORS | {"POOLING": "max", "K": 1}
    options, blocks = options_of(tile), blocks_of(tile)
    winners = batch.winners or torch.uint8
    ptx, shared = compiled(forward_kernel, arch, operand, options, absent, winners, **constants, **blocks)
    check(arch, operand, ptx, shared, directory, unit=batch == Batch())


@pytest.mark.parametrize("arch, operand, dim", points(CASES, EVERYWHERE))
def test_forward(arch, operand, dim, tmp_path):
    compile_forward(arch, operand, dim, Batch(), tmp_path)


# Each pair of properties occurs once at least.
BATCHES = {
    "masked-training": Batch(masks=True),
    "scoring": Batch(masks=True, winners=None),
    "long-training": Batch(long_queries=True, masks=True, winners=torch.int16),
    "long-scoring": Batch(long_queries=True, winners=None),
    "candidates-training": Batch(32, candidates=True, masks=True),
    "candidates-scoring": Batch(32, candidates=True, winners=None),
}


@pytest.mark.parametrize("operand, dim", EVERYWHERE)
@pytest.mark.parametrize("name", BATCHES)
def test_forward_of_other_batches(operand, dim, name, tmp_path):
    compile_forward(90, operand, dim, BATCHES[name], tmp_path)


@pytest.mark.smoke
def test_live_tokens(tmp_path):
    kernel = compiled(live_tokens_kernel, 90, "bf16", {"num_warps": 2}, BLOCK=256)
    check(90, "bf16", *kernel, tmp_path)
