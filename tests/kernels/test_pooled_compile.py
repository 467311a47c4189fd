"""The pooling kernels compile without a GPU, fit the GPUs of the tables, and spill nothing."""

import pytest
import torch

pytest.importorskip("triton")

from pylate_fastmaxsim.kernels.maxsim.forward import forward_kernel  # noqa: E402
from pylate_fastmaxsim.kernels.maxsim.plan import VECTORS  # noqa: E402
from pylate_fastmaxsim.kernels.pooled.launch import (  # noqa: E402
    document_gradient_tiles,
    forward_tiles,
    query_gradient_tiles,
)
from pylate_fastmaxsim.kernels.pooled.smooth_gradients import (  # noqa: E402
    coefficients_kernel,
    smooth_document_gradient_kernel,
    smooth_query_gradient_kernel,
)
from pylate_fastmaxsim.kernels.pooled.top_many_forward import top_many_kernel  # noqa: E402
from tests.support.compiled import OF_COMPRESSED, OF_SMOOTH, blocks_of, check, compiled, kind, options_of, points  # noqa: E402

pytestmark = pytest.mark.compile

EVERYWHERE = (("bf16", 128),)
CASES = [*EVERYWHERE, ("bf16", 768), ("fp16", 128), ("bf16x6", 128), ("bf16x3", 128), ("tf32", 128)]
PACKED = ("q_keep", "live_tokens", "candidates")
ALL_ROWS = (*PACKED, "q_rows", "q_offsets", "pairs", "pair_offsets")


def compile_forward(arch, operand, dim, k, directory, absent=PACKED, pooling="softmax", **more):
    tile = forward_tiles(arch, kind(operand), dim, 4096, k)
    constants = {"DIM": dim, "ROWS_PER_QUERY": 32, "ONE_QUERY": False, "WANT_WINNERS": k > 0, "K": k, "KEPT": k, **more}
    constants |= VECTORS | {"POOLING": "top k" if k else pooling}
    kernel = forward_kernel if k <= 4 else top_many_kernel
    absent = (*absent, "zero_floor", *OF_COMPRESSED, *(OF_SMOOTH if k else ["winners"]))
    ptx, shared = compiled(kernel, arch, operand, options_of(tile), absent, torch.int16, **constants, **blocks_of(tile))
    check(arch, operand, ptx, shared, directory)


@pytest.mark.parametrize("arch, operand, dim", points(CASES, EVERYWHERE))
@pytest.mark.parametrize("k", [0, 4, 16], ids=["softmax", "top-4", "top-16"])
def test_forward(arch, operand, dim, k, tmp_path):
    compile_forward(arch, operand, dim, k, tmp_path)


@pytest.mark.parametrize("k", [0, 4], ids=["log-sum-exp", "top-4"])
def test_forward_with_masks_and_candidates(k, tmp_path):
    compile_forward(90, "bf16", 128, k, tmp_path, absent=("pooled",), pooling="log-sum-exp", ONE_QUERY=True)


@pytest.mark.parametrize("arch, operand, dim", points(CASES, EVERYWHERE))
@pytest.mark.parametrize("log_sum_exp", [False, True], ids=["softmax", "log-sum-exp"])
def test_gradients(arch, operand, dim, log_sum_exp, tmp_path):
    gradients = "fp16" if operand == "fp16" else kind(operand)
    absent = (*ALL_ROWS, "slopes") if log_sum_exp else ALL_ROWS
    for kernel, tile in (
        (
            smooth_query_gradient_kernel,
            query_gradient_tiles(arch, gradients, dim, not log_sum_exp),
        ),
        (smooth_document_gradient_kernel, document_gradient_tiles(arch, gradients, dim, False)),
    ):
        ptx, shared = compiled(kernel, arch, operand, options_of(tile), absent, DIM=dim, **blocks_of(tile))
        check(arch, operand, ptx, shared, tmp_path)


@pytest.mark.parametrize(
    "absent", [("candidates", "pairs", "pair_offsets"), ("q_rows", "q_offsets")], ids=["all", "own"]
)
def test_gradients_with_masks(absent, tmp_path):
    for kernel, tile in (
        (smooth_query_gradient_kernel, query_gradient_tiles(90, "half", 128, False)),
        (smooth_document_gradient_kernel, document_gradient_tiles(90, "half", 128, "pairs" not in absent)),
    ):
        check(90, "bf16", *compiled(kernel, 90, "bf16", options_of(tile), absent, DIM=128, **blocks_of(tile)), tmp_path)


def test_coefficients(tmp_path):
    kernel = compiled(coefficients_kernel, 90, "bf16", {"num_warps": 4}, BLOCK_S=16, BLOCK_R=32)
    check(90, "bf16", *kernel, tmp_path)
