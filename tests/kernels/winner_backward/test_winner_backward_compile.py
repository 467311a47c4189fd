"""The kernels of the gradients compile without a GPU, fit the GPUs of the tables, and spill nothing."""

import pytest
import torch

pytest.importorskip("triton")

from compiled import blocks_of, check, compiled, kind, options_of, points  # noqa: E402

from pylate_fastmaxsim.kernels.winner_backward.candidate_order import candidate_order_kernel  # noqa: E402
from pylate_fastmaxsim.kernels.winner_backward.document_gradient import (  # noqa: E402
    candidate_document_gradient_kernel,
    document_gradient_kernel,
)
from pylate_fastmaxsim.kernels.winner_backward.query_gradient import query_gradient_kernel  # noqa: E402
from pylate_fastmaxsim.kernels.winner_backward.tiles import (  # noqa: E402
    candidate_gradient_tiles,
    document_gradient_tiles,
    query_gradient_tiles,
)
from pylate_fastmaxsim.kernels.winner_backward.winner_buckets import (  # noqa: E402
    count_kernel,
    place_kernel,
    row_query_kernel,
)

pytestmark = pytest.mark.compile

EVERYWHERE = (("bf16", 128), ("bf16x6", 128))
CASES = [*EVERYWHERE, ("bf16", 96), ("bf16", 256), ("bf16", 768), ("fp16", 128)]
CASES += [("bf16x6", 100), ("bf16x6", 768), ("bf16x3", 128), ("tf32", 128)]


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
    ):
        check(90, "bf16", *compiled(kernel, 90, "bf16", {"num_warps": warps}, **blocks), tmp_path)
