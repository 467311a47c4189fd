"""The projection's kernels compile without a GPU, fit the GPUs of the tables, and spill nothing."""

import pytest

pytest.importorskip("triton")

from pylate_fastmaxsim.kernels.projection import tiles as projection_tiles  # noqa: E402
from pylate_fastmaxsim.kernels.projection.backward import (  # noqa: E402
    hidden_gradient_kernel,
    weight_gradient_kernel,
)
from pylate_fastmaxsim.kernels.projection.forward import normalize_kernel, project_kernel  # noqa: E402
from tests.support.compiled import blocks_of, check, compiled, kind, options_of, points  # noqa: E402

pytestmark = pytest.mark.compile

EVERYWHERE = (("bf16", 768, 128), ("bf16x6", 768, 128))
CASES = [*EVERYWHERE, ("bf16", 1024, 96), ("bf16", 4096, 1024), ("bf16", 100, 48), ("fp16", 768, 128)]
CASES += [("bf16x6", 1024, 512), ("bf16x3", 768, 128), ("tf32", 768, 128)]
KERNELS = {
    "project": project_kernel,
    "hidden_gradient": hidden_gradient_kernel,
    "weight_gradient": weight_gradient_kernel,
}


def compile_kernel(name, arch, operand, dim_in, dim_out, directory, absent=()):
    tile = getattr(projection_tiles, f"{name}_tiles")(arch, kind(operand), dim_in, dim_out)
    if dim_out <= tile.block_d:
        absent = (*absent, "squares")
    sizes = {"IN": dim_in, "OUT": dim_out, "NORMALIZE": True}
    found = compiled(KERNELS[name], arch, operand, options_of(tile), absent, **sizes, **blocks_of(tile))
    check(arch, operand, *found, directory, unit=dim_in == 768)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("arch, operand, dim_in, dim_out", points(CASES, EVERYWHERE))
def test_kernels(name, arch, operand, dim_in, dim_out, tmp_path):
    compile_kernel(name, arch, operand, dim_in, dim_out, tmp_path)


@pytest.mark.parametrize("name", ["project", "weight_gradient"])
def test_without_a_bias(name, tmp_path):
    compile_kernel(name, 90, "bf16", 768, 128, tmp_path, absent=("bias", "grad_biases"))


@pytest.mark.smoke
@pytest.mark.parametrize("operand", ["bf16", "bf16x6"])
def test_normalize(operand, tmp_path):
    sizes = {"OUT": 1024, "COLUMN_BLOCKS": 4, "BLOCK_T": 16, "BLOCK_D": 128}
    check(90, operand, *compiled(normalize_kernel, 90, operand, {"num_warps": 4}, **sizes), tmp_path)
