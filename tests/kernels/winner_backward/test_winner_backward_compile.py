"""The kernels of the gradients compile without a GPU, fit the GPUs of the tables, and spill nothing."""

import pytest
import torch

pytest.importorskip("triton")

from pylate_fastmaxsim.kernels.runtime.arch import ALL_REGISTERS, next_power_of_2  # noqa: E402
from pylate_fastmaxsim.kernels.winner_backward.document_gradient import (  # noqa: E402
    candidate_document_gradient_kernel,
    document_gradient_kernel,
)
from pylate_fastmaxsim.kernels.winner_backward.launch import in_flight  # noqa: E402
from pylate_fastmaxsim.kernels.winner_backward.query_gradient import query_gradient_kernel  # noqa: E402
from pylate_fastmaxsim.kernels.winner_backward.sorting import (  # noqa: E402
    candidate_order_kernel,
    count_kernel,
    place_kernel,
    row_query_kernel,
)
from pylate_fastmaxsim.kernels.winner_backward.tiles import (  # noqa: E402
    candidate_gradient_tiles,
    document_gradient_tiles,
    query_gradient_tiles,
)
from tests.support.compiled import blocks_of, check, compiled, kind, options_of, points  # noqa: E402

pytestmark = pytest.mark.compile

# Element, size of a vector, winners of a row and document.
EVERYWHERE = (("bf16", 128, 1), ("bf16x6", 128, 1), ("bf16", 128, 4), ("bf16x6", 128, 4))
CASES = [*EVERYWHERE, ("bf16", 96, 1), ("bf16", 256, 1), ("bf16", 768, 1), ("fp16", 128, 1)]
CASES += [("bf16x6", 100, 1), ("bf16x6", 768, 1), ("bf16x3", 128, 1), ("tf32", 128, 1)]
CASES += [("bf16", 768, 4), ("fp16", 128, 4), ("bf16", 128, 64)]


def all_registers(ranks):
    return {} if ranks == 1 else {"maxnreg": ALL_REGISTERS}


@pytest.mark.parametrize(
    "arch, operand, dim, ranks", points([*EVERYWHERE, ("bf16", 768, 1), ("bf16", 128, 64)], EVERYWHERE)
)
def test_query_gradient(arch, operand, dim, ranks, tmp_path):
    tile = query_gradient_tiles(arch, kind(operand), dim)
    constants = {"DIM": dim, **blocks_of(tile), **in_flight(tile, ranks, warps=0)}
    options = options_of(tile) | all_registers(ranks)
    # With all documents it writes the query of each row for the document gradient.
    for absent in (("candidates",), ("row_query",)) if arch == 90 else (("candidates",),):
        kernel = compiled(query_gradient_kernel, arch, operand, options, absent, **constants)
        check(arch, operand, *kernel, tmp_path)


@pytest.mark.parametrize("arch, operand, dim, ranks", points(CASES, EVERYWHERE))
def test_document_gradient(arch, operand, dim, ranks, tmp_path):
    tile = document_gradient_tiles(arch, kind(operand), dim)
    constants = {"DIM": dim, "SETS": ranks > 1, "WRITE_ZEROS": False, **blocks_of(tile)}
    types = {"buckets": "*i64"} if ranks > 1 else {}
    kernel = compiled(document_gradient_kernel, arch, operand, options_of(tile), types=types, **constants)
    check(arch, operand, *kernel, tmp_path)


def compile_candidates(arch, operand, dim, ranks, directory, absent=(), write_zeros=False):
    tile = candidate_gradient_tiles(arch, kind(operand), dim)
    constants = {"DIM": dim, "RANKS": ranks, "SHORT_QUERIES": ranks == 1, "WRITE_ZEROS": write_zeros}
    constants |= {"BLOCK_SCAN": 2048, **blocks_of(tile)}
    options = options_of(tile) | all_registers(ranks)
    kernel = compiled(candidate_document_gradient_kernel, arch, operand, options, absent, **constants)
    check(arch, operand, *kernel, directory)


@pytest.mark.parametrize("arch, operand, dim, ranks", points(CASES, EVERYWHERE))
def test_candidate_document_gradient(arch, operand, dim, ranks, tmp_path):
    compile_candidates(arch, operand, dim, ranks, tmp_path)


@pytest.mark.parametrize("operand", ["bf16", "bf16x6"])
def test_candidate_document_gradient_that_looks_for_its_pairs(operand, tmp_path):
    compile_candidates(90, operand, 128, 1, tmp_path, ("pairs", "pair_offsets"), write_zeros=True)


@pytest.mark.smoke
@pytest.mark.parametrize("arch, winners", [(90, torch.uint8), (90, torch.int16), (80, torch.uint8)])
def test_buckets(arch, winners, tmp_path):
    tile = document_gradient_tiles(arch, "half", 128)
    sizes = {"RANKS": 1, "BLOCK_RANKS": 1, "BLOCK_T": tile.block_t, "BLOCK_SCAN": tile.rows_of_scan}
    for kernel in (count_kernel, place_kernel):
        scan = compiled(kernel, arch, "bf16", {"num_warps": tile.scan_warps}, winners=winners, **sizes)
        check(arch, "bf16", *scan, tmp_path)


@pytest.mark.smoke
@pytest.mark.parametrize("arch, winners, ranks", [(90, torch.int16, 4), (80, torch.uint8, 7), (90, torch.int16, 64)])
def test_sets(arch, winners, ranks, tmp_path):
    tile = document_gradient_tiles(arch, "half", 128)
    padded = next_power_of_2(ranks)
    sizes = {"RANKS": ranks, "BLOCK_RANKS": padded, "BLOCK_T": tile.block_t, "BLOCK_SCAN": min(1024, 2048 // padded)}
    for kernel in (count_kernel, place_kernel):
        options, types = {"num_warps": tile.scan_warps}, {"buckets": "*i64"}
        check(arch, "bf16", *compiled(kernel, arch, "bf16", options, winners=winners, types=types, **sizes), tmp_path)


@pytest.mark.smoke
def test_helpers(tmp_path):
    for kernel, warps, blocks in (
        (row_query_kernel, 1, {"BLOCK": 128}),
        (candidate_order_kernel, 4, {"BLOCK": 8, "BLOCK_SCAN": 1024}),
    ):
        check(90, "bf16", *compiled(kernel, 90, "bf16", {"num_warps": warps}, **blocks), tmp_path)
