"""The kernels of SPLADE's pooling compile without a GPU, fit the GPUs of the tables, and spill nothing."""

import pytest
import torch

pytest.importorskip("triton")

from pylate_fastmaxsim.kernels.splade.launch import maxima_tiles  # noqa: E402
from pylate_fastmaxsim.kernels.splade.maxima import maxima_kernel, slots_kernel, values_kernel  # noqa: E402
from pylate_fastmaxsim.kernels.splade.slopes import slopes_kernel, vocabulary_gradient_kernel  # noqa: E402
from tests.support.compiled import blocks_of, check, compiled, kind, options_of, points  # noqa: E402

pytestmark = pytest.mark.compile

EVERYWHERE = (("bf16", 768), ("bf16x6", 768))
CASES = [*EVERYWHERE, ("bf16", 384), ("fp16", 100), ("bf16", 32), ("bf16x3", 768), ("tf32", 768)]


def compile_maxima(arch, operand, dim, directory, absent=(), rectified=True):
    tile = maxima_tiles(arch, kind(operand), dim)
    ptx, shared = compiled(
        maxima_kernel, arch, operand, options_of(tile), absent,
        DIM=dim, RECTIFIED=rectified, GROUP=8, TILES_TOGETHER=tile.tiles_together, **blocks_of(tile),
    )  # fmt: skip
    check(arch, operand, ptx, shared, directory, unit=True)


@pytest.mark.parametrize("arch, operand, dim", points(CASES, EVERYWHERE))
def test_maxima(arch, operand, dim, tmp_path):
    compile_maxima(arch, operand, dim, tmp_path)


def test_maxima_that_may_be_negative(tmp_path):
    compile_maxima(90, "bf16", 768, tmp_path, ("bias",), rectified=False)


@pytest.mark.smoke
@pytest.mark.parametrize("logs", [0, 2])
def test_values(logs, tmp_path):
    for absent, winners in (((), torch.int16), (("winners",), torch.uint8)):
        kernel = compiled(
            values_kernel, 80, "bf16", {"num_warps": 4}, absent, winners,
            RECTIFIED=logs > 0, LOGS=logs, BLOCK=1024,
        )  # fmt: skip
        check(80, "bf16", *kernel, tmp_path)


@pytest.mark.parametrize("operand, dim", [("bf16", 768), ("bf16x6", 768), ("fp16", 2560)])
def test_gradients(operand, dim, tmp_path):
    kernel = compiled(slopes_kernel, 80, operand, {"num_warps": 4}, LOGS=1, BLOCK_N=32, BLOCK_M=64)
    check(80, operand, *kernel, tmp_path)
    kernel = compiled(
        vocabulary_gradient_kernel, 80, operand, {"num_warps": 1}, types={"grad_weight": "*bf16", "grad_bias": "*fp32"},
        DIM=dim, BLOCK_N=4, BLOCK_D=1024,
    )  # fmt: skip
    check(80, operand, *kernel, tmp_path)


def test_slots(tmp_path):
    for absent in ((), ("live_tokens",)):
        kernel = compiled(slots_kernel, 80, "bf16", {"num_warps": 2}, absent, GROUP=8, BLOCK=256)
        check(80, "bf16", *kernel, tmp_path)
