"""The attention kernels compile for the GPU that they are used on, with its matrix units."""

import pytest

pytest.importorskip("triton")

from compiled import SHARED_MEMORY, check, compiled, options_of  # noqa: E402

from pylate_fastmaxsim.kernels.attention import launch  # noqa: E402
from pylate_fastmaxsim.kernels.attention.long import (  # noqa: E402
    long_attention_gradient_kernel,
    long_attention_kernel,
)
from pylate_fastmaxsim.kernels.attention.rotary import rotary_kernel  # noqa: E402
from pylate_fastmaxsim.kernels.attention.short import (  # noqa: E402
    short_attention_gradient_kernel,
    short_attention_kernel,
)

pytestmark = pytest.mark.compile

LAYOUT = {"Q_ROW": 64, "K_ROW": 64, "V_ROW": 768, "GRAD_ROW": 768, "HEADS": 12, "DIM": 64, "SCALE": 0.125}
KERNELS = {
    "forward": (short_attention_kernel, long_attention_kernel, launch.FORWARD),
    "backward": (short_attention_gradient_kernel, long_attention_gradient_kernel, launch.BACKWARD),
}


@pytest.mark.parametrize("operand, window", [pytest.param("bf16", True, marks=pytest.mark.smoke), ("fp16", False)])
@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize("short, long, tiles", KERNELS.values(), ids=KERNELS)
def test_tiles_of_the_table(short, long, tiles, rotary, operand, window):
    layout = LAYOUT | dict.fromkeys(["Q_ROW", "K_ROW", "V_ROW"], 2304) if rotary else LAYOUT
    for tile in (*tiles.short, tiles.long):
        kernel = long if tile is tiles.long else short
        constants = layout | {"HAS_WINDOW": window, "LONGER_THAN": 0, "BLOCK": tile.block}
        ptx, shared = compiled(kernel, 90, operand, options_of(tile), () if rotary else ("cos", "sin"), **constants)
        # Some spill a few registers, and were faster than those that spill none.
        assert shared <= SHARED_MEMORY[90]
        assert ("wgmma.mma_async" in ptx) == (tile.block >= 64)


def test_turning_in_place(tmp_path):
    constants = {"HEADS": 12, "DIM": 64, "BLOCK": launch.TURNED}
    ptx, shared = compiled(rotary_kernel, 90, "bf16", {"num_warps": 4}, **constants)
    check(90, "bf16", ptx, shared, tmp_path)
    assert "st.global.v4" in ptx, "16 bytes at a time"
