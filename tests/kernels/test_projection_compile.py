"""The kernels of the projection compile for every GPU architecture of the tables, without a GPU, and spill nothing."""

import pytest

pytest.importorskip("triton")

from test_maxsim_compile import check, compiled, kind, precision, pytestmark  # noqa: E402, F401

from pylate_fastmaxsim.kernels.projection import tiles as projection_tiles  # noqa: E402
from pylate_fastmaxsim.kernels.projection.backward import (  # noqa: E402
    hidden_gradient_kernel,
    weight_gradient_kernel,
)
from pylate_fastmaxsim.kernels.projection.forward import normalize_kernel, project_kernel  # noqa: E402
from pylate_fastmaxsim.kernels.runtime.arch import ARCHITECTURES  # noqa: E402

CASES = [
    ("bf16", 768, 128),
    ("bf16", 1024, 96),
    ("bf16", 4096, 1024),
    ("bf16", 100, 48),
    ("fp16", 768, 128),
    ("bf16x6", 768, 128),
    ("bf16x6", 1024, 512),
    ("bf16x3", 768, 128),
    ("tf32", 768, 128),
]


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("operand, dim_in, dim_out", CASES)
@pytest.mark.parametrize("absent", [("bias", "grad_biases"), ()], ids=["no bias", "bias"])
@pytest.mark.parametrize("kernel", ["project", "hidden_gradient", "weight_gradient"])
def test_kernels(arch, operand, dim_in, dim_out, absent, kernel, tmp_path):
    if kernel == "hidden_gradient" and absent:
        pytest.skip("has no bias")
    tile = getattr(projection_tiles, f"{kernel}_tiles")(arch, kind(operand), dim_in, dim_out)
    function = {
        "project": project_kernel,
        "hidden_gradient": hidden_gradient_kernel,
        "weight_gradient": weight_gradient_kernel,
    }[kernel]
    if dim_out <= tile.block_d:
        absent = (*absent, "squares")
    blocks = {name.upper(): value for name, value in tile._asdict().items() if name.startswith("block")}
    ptx, shared = compiled(
        function,
        arch,
        operand,
        {"num_warps": tile.num_warps, "num_stages": tile.num_stages},
        absent,
        IN=dim_in,
        OUT=dim_out,
        NORMALIZE=True,
        PRECISION=precision(operand),
        **blocks,
    )
    check(arch, operand, ptx, shared, tmp_path)
    if kind(operand) == "half" and dim_in == 768:
        unit = {90: "wgmma.mma_async", 100: "tcgen05.mma"}.get(arch, "mma.sync")
        assert unit in ptx


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("operand", ["bf16", "bf16x6"])
def test_normalize(arch, operand, tmp_path):
    ptx, shared = compiled(
        normalize_kernel, arch, operand, {"num_warps": 4}, OUT=1024, COLUMN_BLOCKS=4, BLOCK_T=16, BLOCK_D=128
    )
    check(arch, operand, ptx, shared, tmp_path)
