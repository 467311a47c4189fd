"""MaxSim's kernels compile without a GPU, fit the GPUs of the tables, and spill nothing."""

from typing import NamedTuple

import pytest
import torch

pytest.importorskip("triton")

from compiled import blocks_of, check, compiled, kind, options_of, points  # noqa: E402

from pylate_fastmaxsim.kernels.maxsim.candidate_order import candidate_order_kernel  # noqa: E402
from pylate_fastmaxsim.kernels.maxsim.document_gradient import (  # noqa: E402
    candidate_document_gradient_kernel,
    document_gradient_kernel,
)
from pylate_fastmaxsim.kernels.maxsim.forward import forward_kernel  # noqa: E402
from pylate_fastmaxsim.kernels.maxsim.query_gradient import query_gradient_kernel  # noqa: E402
from pylate_fastmaxsim.kernels.maxsim.tiles import (  # noqa: E402
    candidate_gradient_tiles,
    document_gradient_tiles,
    forward_tiles,
    query_gradient_tiles,
)
from pylate_fastmaxsim.kernels.maxsim.winner_buckets import count_kernel, place_kernel, row_query_kernel  # noqa: E402
from pylate_fastmaxsim.kernels.primitives.live_rows import live_tokens_kernel  # noqa: E402

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
    absent += () if want_winners else ("winners",)
    one_query = batch.candidates or batch.long_queries
    constants = {"DIM": dim, "ROWS_PER_QUERY": 32, "ONE_QUERY": one_query, "WANT_WINNERS": want_winners}
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


@pytest.mark.parametrize("arch, operand, dim", points([*EVERYWHERE, ("bf16", 768)], EVERYWHERE))
def test_query_gradient(arch, operand, dim, tmp_path):
    tile = query_gradient_tiles(arch, kind(operand), dim)
    # With all documents it writes the query of each row for the document gradient.
    for absent in (("candidates",), ("row_query",)) if arch == 90 else (("candidates",),):
        kernel = compiled(query_gradient_kernel, arch, operand, options_of(tile), absent, DIM=dim, **blocks_of(tile))
        check(arch, operand, *kernel, tmp_path)


@pytest.mark.parametrize("arch, operand, dim", points(CASES, EVERYWHERE))
def test_document_gradient(arch, operand, dim, tmp_path):
    tile = document_gradient_tiles(arch, kind(operand), dim)
    constants = {"DIM": dim, "WRITE_ZEROS": False, **blocks_of(tile)}
    check(arch, operand, *compiled(document_gradient_kernel, arch, operand, options_of(tile), **constants), tmp_path)


def compile_candidates(arch, operand, dim, directory, absent=(), write_zeros=False):
    tile = candidate_gradient_tiles(arch, kind(operand), dim)
    constants = {"DIM": dim, "SHORT_QUERIES": True, "WRITE_ZEROS": write_zeros, "BLOCK_SCAN": 2048, **blocks_of(tile)}
    options = options_of(tile)
    kernel = compiled(candidate_document_gradient_kernel, arch, operand, options, absent, **constants)
    check(arch, operand, *kernel, directory)


@pytest.mark.parametrize("arch, operand, dim", points(CASES, EVERYWHERE))
def test_candidate_document_gradient(arch, operand, dim, tmp_path):
    compile_candidates(arch, operand, dim, tmp_path)


@pytest.mark.parametrize("operand, dim", EVERYWHERE)
def test_candidate_document_gradient_that_looks_for_its_pairs(operand, dim, tmp_path):
    compile_candidates(90, operand, dim, tmp_path, ("pairs", "pair_offsets"), write_zeros=True)


@pytest.mark.smoke
@pytest.mark.parametrize("arch, winners", [(90, torch.uint8), (90, torch.int16), (80, torch.uint8)])
def test_buckets(arch, winners, tmp_path):
    tile = document_gradient_tiles(arch, "half", 128)
    sizes = {"BLOCK_T": tile.block_t, "BLOCK_SCAN": tile.block_scan}
    for kernel in (count_kernel, place_kernel):
        scan = compiled(kernel, arch, "bf16", {"num_warps": tile.scan_warps}, winners=winners, **sizes)
        check(arch, "bf16", *scan, tmp_path)


@pytest.mark.smoke
def test_helpers(tmp_path):
    for kernel, warps, blocks in (
        (row_query_kernel, 1, {"BLOCK": 128}),
        (candidate_order_kernel, 4, {"BLOCK": 8, "BLOCK_SCAN": 1024}),
        (live_tokens_kernel, 2, {"BLOCK": 256}),
    ):
        check(90, "bf16", *compiled(kernel, 90, "bf16", {"num_warps": warps}, **blocks), tmp_path)
