"""The attention kernels compile for the GPUs that they are used on, with their matrix units."""

import pytest

pytest.importorskip("triton")

from test_maxsim_compile import SHARED_MEMORY, compiled  # noqa: E402
from test_maxsim_compile import pytestmark as pytestmark  # noqa: E402

from pylate_fastmaxsim.kernels.attention import launch as attention_launch  # noqa: E402
from pylate_fastmaxsim.kernels.attention.long import (  # noqa: E402
    long_attention_gradient_kernel,
    long_attention_kernel,
)
from pylate_fastmaxsim.kernels.attention.short import (  # noqa: E402
    short_attention_gradient_kernel,
    short_attention_kernel,
)

LAYOUT = {"Q_ROW": 64, "K_ROW": 64, "V_ROW": 768, "HEADS": 12, "DIM": 64, "SCALE": 0.125}


@pytest.mark.parametrize("window", [False, True])
@pytest.mark.parametrize("operand", ["bf16", "fp16"])
@pytest.mark.parametrize(
    "short, long, tiles",
    [
        (short_attention_kernel, long_attention_kernel, attention_launch.FORWARD),
        (short_attention_gradient_kernel, long_attention_gradient_kernel, attention_launch.BACKWARD),
    ],
    ids=["forward", "backward"],
)
def test_tiles_of_the_table(short, long, tiles, operand, window):
    layout = LAYOUT | {"HAS_WINDOW": window, "LONGER_THAN": 0, "GRAD_ROW": 768}
    for tile in (*tiles.short, tiles.long):
        options = {"num_warps": tile.num_warps, "maxnreg": tile.max_registers}
        kernel = long if tile is tiles.long else short
        ptx, shared = compiled(kernel, 90, operand, options, **layout, BLOCK=tile.block)
        # Some spill a few registers, and were faster than those that spill none.
        assert shared <= SHARED_MEMORY[90]
        assert ("wgmma.mma_async" in ptx) == (tile.block >= 64)
