"""XTR's kernels compile without a GPU, fit the GPUs of the tables, and spill nothing."""

import pytest
import torch

pytest.importorskip("triton")

from pylate_fastmaxsim.kernels.primitives.live_rows import live_rows_kernel  # noqa: E402
from pylate_fastmaxsim.kernels.runtime.arch import ALL_REGISTERS  # noqa: E402
from pylate_fastmaxsim.kernels.xtr.kth_largest import (  # noqa: E402
    bisect_kernel,
    bound_kernel,
    collect_kernel,
    select_kernel,
)
from pylate_fastmaxsim.kernels.xtr.launch import collect_tiles, maxima_tiles  # noqa: E402
from pylate_fastmaxsim.kernels.xtr.scores import xtr_scores_kernel  # noqa: E402
from pylate_fastmaxsim.kernels.xtr.token_maxima import negative_maxima_kernel, token_maxima_kernel  # noqa: E402
from tests.support.compiled import blocks_of, check, compiled, kind, options_of, points  # noqa: E402

pytestmark = pytest.mark.compile

# Dtype, d and number of query rows.
EVERYWHERE = (("bf16", 128, 4096), ("bf16x6", 128, 4096))
CASES = [*EVERYWHERE, ("bf16", 128, 32), ("bf16", 96, 4096), ("bf16", 768, 4096), ("fp16", 128, 4096)]
CASES += [("bf16x6", 768, 4096), ("bf16x3", 128, 4096), ("tf32", 128, 4096)]


@pytest.mark.parametrize("kernel", [token_maxima_kernel, negative_maxima_kernel], ids=["maxima", "negative"])
@pytest.mark.parametrize("arch, operand, dim, rows", points(CASES, EVERYWHERE))
def test_maxima(arch, operand, dim, rows, kernel, tmp_path):
    tile = maxima_tiles(arch, kind(operand), dim, rows)
    constants = {"DIM": dim, "WANT_WINNERS": True, **blocks_of(tile)}
    found = compiled(kernel, arch, operand, options_of(tile), **constants)
    check(arch, operand, *found, tmp_path, unit=kernel is token_maxima_kernel and rows == 4096)


@pytest.mark.parametrize("kernel", [collect_kernel, bisect_kernel], ids=["collect", "bisect"])
@pytest.mark.parametrize("arch, operand, dim, rows", points(CASES, EVERYWHERE))
def test_kth_largest(arch, operand, dim, rows, kernel, tmp_path):
    tile = collect_tiles(arch, kind(operand), dim, rows)
    options = options_of(tile) | ({"maxnreg": ALL_REGISTERS} if kernel is bisect_kernel else {})
    block_k = maxima_tiles(arch, kind(operand), dim, rows).block_k
    found = compiled(kernel, arch, operand, options, DIM=dim, BLOCK_K=block_k, **blocks_of(tile))
    # On the same unit as the maxima, with which its similarities are compared bit by bit.
    check(arch, operand, *found, tmp_path, unit=True)


@pytest.mark.smoke
def test_helpers(tmp_path):
    for kernel, block, warps in ((bound_kernel, 4096, 4), (select_kernel, 2048, 4), (live_rows_kernel, 256, 2)):
        check(90, "bf16", *compiled(kernel, 90, "bf16", {"num_warps": warps}, BLOCK=block), tmp_path)
    for winners, count_retrieved in ((torch.uint8, False), (torch.int16, True)):
        sizes = {"WANT_WINNERS": True, "COUNT_RETRIEVED": count_retrieved, "BLOCK_S": 16, "BLOCK_R": 32}
        options = {"num_warps": 4, "maxnreg": ALL_REGISTERS}
        check(90, "bf16", *compiled(xtr_scores_kernel, 90, "bf16", options, winners=winners, **sizes), tmp_path)


def test_without_what_may_be_absent(tmp_path):
    tile = maxima_tiles(90, "half", 128, 4096)
    sizes = {"DIM": 128, "BLOCK_S": 16, "BLOCK_R": 32, "BLOCK": 256, "WANT_WINNERS": False, "COUNT_RETRIEVED": False}
    absent = ("groups", "live_tokens", "q_keep", "candidates", "zero_floor")
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    for kernel in (token_maxima_kernel, negative_maxima_kernel, live_rows_kernel, xtr_scores_kernel):
        check(90, "bf16", *compiled(kernel, 90, "bf16", options, absent, **sizes, **blocks_of(tile)), tmp_path)
