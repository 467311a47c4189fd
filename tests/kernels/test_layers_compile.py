"""The kernels of encoder layers compile for the GPU that they are used on, without spills."""

import pytest

pytest.importorskip("triton")

from pylate_fastmaxsim.kernels.layers import launch  # noqa: E402
from pylate_fastmaxsim.kernels.layers.glu import glu_gradient_kernel, glu_kernel  # noqa: E402
from pylate_fastmaxsim.kernels.layers.norm import norm_gradient_kernel, sum_parts_kernel  # noqa: E402
from tests.support.compiled import check, compiled  # noqa: E402

pytestmark = pytest.mark.compile


@pytest.mark.parametrize("operand", [pytest.param("bf16", marks=pytest.mark.smoke), "fp16"])
@pytest.mark.parametrize("kernel", [glu_kernel, glu_gradient_kernel], ids=["forward", "backward"])
def test_gated_linear_unit(kernel, operand, tmp_path):
    constants = {"F": 1152, "BLOCK": launch.GLU_BLOCK}
    types = dict.fromkeys(("x", "hidden", "grad_hidden", "grad_x"), f"*{operand}")
    ptx, shared = compiled(kernel, 90, operand, {"num_warps": 4}, types=types, **constants)
    check(90, operand, ptx, shared, tmp_path)
    assert "ld.global.v4" in ptx and "st.global.v4" in ptx, "16 bytes at a time"


@pytest.mark.parametrize("dim", [384, pytest.param(768, marks=pytest.mark.smoke), 1024, 4096])
def test_norm_and_residual(dim, tmp_path):
    constants = {"DIM": dim, "BLOCK": launch.next_power_of_2(dim)}
    names = "total", "mean", "rstd", "grad_total", "grad_x", "weight", "weight_parts"
    types = dict.fromkeys(names, "*fp32") | dict.fromkeys(("grad", "grad_branch"), "*bf16")
    options = {"num_warps": launch.norm_warps(dim)}
    ptx, shared = compiled(norm_gradient_kernel, 90, "bf16", options, ("bias_parts",), types=types, **constants)
    check(90, "bf16", ptx, shared, tmp_path)
    assert "ld.global.v4" in ptx and "st.global.v4" in ptx, "16 bytes at a time"


def test_sums_of_parts(tmp_path):
    constants = {"DIM": 768, "ROWS": launch.SUM_ROWS, "BLOCK": launch.SUM_BLOCK}
    ptx, shared = compiled(
        sum_parts_kernel, 90, "bf16", {"num_warps": 8}, types=dict.fromkeys(("parts", "sums"), "*fp32"), **constants
    )
    check(90, "bf16", ptx, shared, tmp_path)
