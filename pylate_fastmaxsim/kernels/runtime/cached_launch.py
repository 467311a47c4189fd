"""Launches of Triton kernels that cost the host half of Triton's own."""

from collections.abc import Callable

import triton
from torch import Tensor
from triton.runtime import JITFunction

from pylate_fastmaxsim.kernels.runtime.triton_version import RELEASE

# Of the releases whose compiled kernels take their arguments as `Launcher` hands them over, the one that was tested.
_KNOWN = RELEASE == (3, 6)
_LARGEST_INT32 = 2**31 - 1


def _somebody_listens() -> bool:
    runtime = triton.knobs.runtime
    return bool(runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls)


class Launcher:
    """A kernel that is launched as ``launcher[grid](*arguments, **constants)``, like the Triton kernel it is made of.

    For every launch Triton looks at each argument and each option, to find which of the programs that it compiled from
    the kernel fits. Most of this is known beforehand here: all constants are plain values in one order and numbers are
    not specialised, so that a program is found by a short key. It is compiled, and found the first time, by Triton; so
    is every launch of an interpreted kernel, of an untested release of Triton, and while a profiler listens to
    launches.
    """

    def __init__(self, kernel: Callable):
        self.kernel = kernel
        self._programs = {}
        self._direct = _KNOWN and isinstance(kernel, JITFunction)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable:
        return lambda *arguments, **constants: self._launch(grid, arguments, constants)

    def _launch(self, grid: tuple[int, ...], arguments: tuple[Tensor | int | None, ...], constants: dict) -> None:
        if not self._direct or _somebody_listens():
            self.kernel[grid](*arguments, **constants)
            return
        driver = triton.runtime.driver.active
        device = driver.get_current_device()
        # What Triton compiles programs for: the type of an argument, whether its address is a multiple of 16, whether a
        # number fits in 32 bits, the constants.
        key = [device, *constants.values()]
        for argument in arguments:
            if argument is None:
                key.append(None)
            elif type(argument) is int:
                key.append(argument > _LARGEST_INT32)
            else:
                key.append(argument.dtype)
                key.append(argument.data_ptr() % 16 == 0)
        key = tuple(key)
        known = self._programs.get(key)
        if known is None:
            program = self.kernel[grid](*arguments, **constants)
            names = self.kernel.arg_names[len(arguments) :]
            self._programs[key] = (program, tuple(constants[name] for name in names))
            return
        program, values = known
        program.run(
            grid[0], grid[1] if len(grid) > 1 else 1, 1, driver.get_current_stream(device),
            program.function, program.packed_metadata, None, None, None, *arguments, *values,
        )  # fmt: skip
