"""The attention kernels compile for the GPU that they are used on, with its matrix units."""

import pytest

pytest.importorskip("triton")

from compiled import SHARED_MEMORY, compiled, options_of  # noqa: E402

from pylate_fastmaxsim.kernels.attention import launch  # noqa: E402
from pylate_fastmaxsim.kernels.attention.long import (  # noqa: E402
    long_attention_gradient_kernel,
    long_attention_kernel,
)
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
@pytest.mark.parametrize("short, long, tiles", KERNELS.values(), ids=KERNELS)
def test_tiles_of_the_table(short, long, tiles, operand, window):
    for tile in (*tiles.short, tiles.long):
        kernel = long if tile is tiles.long else short
        constants = LAYOUT | {"HAS_WINDOW": window, "LONGER_THAN": 0, "BLOCK": tile.block}
        ptx, shared = compiled(kernel, 90, operand, options_of(tile), **constants)
        # Some spill a few registers, and were faster than those that spill none.
        assert shared <= SHARED_MEMORY[90]
        assert ("wgmma.mma_async" in ptx) == (tile.block >= 64)
