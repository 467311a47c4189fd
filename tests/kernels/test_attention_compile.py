"""The attention kernels compile for the GPU that they are used on, with its matrix units."""

import pytest

pytest.importorskip("triton")

from pylate_fastmaxsim.kernels.attention import launch  # noqa: E402
from pylate_fastmaxsim.kernels.attention.forward import attention_kernel, rotary_kernel  # noqa: E402
from pylate_fastmaxsim.kernels.attention.gradient import attention_gradient_kernel  # noqa: E402
from tests.support.compiled import SHARED_MEMORY, check, compiled, options_of  # noqa: E402

pytestmark = pytest.mark.compile

KERNELS = {
    "forward": (attention_kernel, launch.FORWARD),
    "backward": (attention_gradient_kernel, launch.BACKWARD),
}


@pytest.mark.parametrize(
    "dim, operand, window, dropout",
    [
        pytest.param(64, "bf16", True, 0.0, marks=pytest.mark.smoke),
        *((dim, "bf16", True, 0.0) for dim in (32, 96, 128)),
        *((dim, "fp16", False, 0.1) for dim in (32, 64, 96, 128)),
    ],
)
@pytest.mark.parametrize("kernel, table", KERNELS.values(), ids=KERNELS)
def test_tiles_of_the_table(kernel, table, dim, operand, window, dropout):
    columns = max(dim, 128 if dim == 96 else 0)
    heads = 768 // dim
    # Rotary positions turn gradients, of one product, back.
    rotary = table is launch.BACKWARD and operand == "bf16" and dim == columns
    rows = [3 * heads * dim] * 3 if rotary else [dim, dim, heads * dim]
    layout = dict(zip(("Q_ROW", "K_ROW", "V_ROW"), rows, strict=True)) | {"GRAD_ROW": heads * dim, "HEADS": heads}
    layout |= {"DIM": dim, "COLUMNS": columns, "SCALE": 0.125, "HAS_WINDOW": window, "DROPOUT": dropout}
    absent = (() if rotary else ("cos", "sin")) + (() if dropout else ("seed",))
    tiles = table[columns]
    for tile in (*tiles.short, tiles.long):
        constants = layout | {"LONGER_THAN": 0, "BLOCK": tile.block, "LONG": tile is tiles.long}
        ptx, shared = compiled(kernel, 90, operand, options_of(tile), absent, **constants)
        # Some spill a few registers, and were faster than those that spill none.
        assert shared <= SHARED_MEMORY[90]
        assert ("wgmma.mma_async" in ptx) == (tile.block >= 64)


def test_log_sums_are_there_where_the_backward_reads_them():
    for columns, tiles in launch.FORWARD.items():
        longest_without = max(tile.block for tile in tiles.short)
        assert max(tile.block for tile in launch.BACKWARD[columns].short) >= longest_without


def test_turning_in_place(tmp_path):
    constants = {"HEADS": 12, "DIM": 64, "BLOCK": launch.TURNED}
    ptx, shared = compiled(rotary_kernel, 90, "bf16", {"num_warps": 4}, **constants)
    check(90, "bf16", ptx, shared, tmp_path)
    assert "st.global.v4" in ptx, "16 bytes at a time"
