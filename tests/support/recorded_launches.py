"""Record which programs the operators launch, as on a GPU of some architecture, without running them."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

from pylate_fastmaxsim.kernels.runtime.cached_launch import Launcher
from tests.support.kernels_on_cpu import kernels_on_cpu


def _kind(argument) -> object:
    """What a program is compiled for: the type of a number, or dtype and alignment of a tensor."""
    if argument is None or isinstance(argument, (int, float)):
        return type(argument), isinstance(argument, int) and argument >= 2**31
    return argument.dtype, argument.data_ptr() % 16 == 0


@contextmanager
def recorded_launches(architecture: int) -> Iterator[set[tuple]]:
    """Operators on a CPU take the kernels' way; yields what is launched. What the kernels would write stays unwritten.

    A program is the name of a kernel, the kinds of its arguments, its constants, and its launcher.
    """
    launched: set[tuple] = set()

    def record(self, grid, arguments, constants):
        kinds, values = tuple(map(_kind, arguments)), tuple(sorted(constants.items(), key=str))
        launched.add((self.kernel.fn.__name__, kinds, values, self))

    with ExitStack() as stack:
        stack.enter_context(kernels_on_cpu())
        # What a launch comes to once its program is chosen: before it there is no record, behind it a GPU.
        stack.enter_context(patch.object(Launcher, "_launch", record))
        for name, module in list(sys.modules.items()):
            if name.startswith("pylate_fastmaxsim.kernels.") and callable(getattr(module, "architecture", None)):
                stack.enter_context(patch.object(module, "architecture", lambda device: architecture))
        yield launched
