"""Launches of Triton kernels in half of the host time that Triton takes."""

from collections.abc import Callable

import triton
from torch import Tensor
from triton.runtime import JITFunction

# The release of Triton, as in (3, 6).
RELEASE = tuple(int(part) for part in triton.__version__.split(".")[:2])
# The one whose calling convention `Launcher` was tested with.
_KNOWN = RELEASE == (3, 6)
_LARGEST_INT32 = 2**31 - 1


def hash_callees(kernel: JITFunction) -> None:
    """Make the key of a kernel in Triton's cache the same in every process.

    A key holds the constants of the functions that the kernel calls, but in Triton 3.6 only of those that have been hashed
    before, by another kernel: keys would depend on which kernel comes first.
    """
    for name in kernel.fn.__code__.co_names:
        called = kernel.fn.__globals__.get(name)
        if isinstance(called, JITFunction):
            hash_callees(called)
    _ = kernel.cache_key


class Launcher:
    """A kernel that is launched as ``launcher[grid](*arguments, **constants)``, like the Triton kernel it is made of.

    At every launch Triton examines each argument and option to find the compiled program that fits. Here most of that is
    known beforehand: constants are plain values in one order, and numbers are not specialised. So a short key finds the
    program. Triton compiles it, and launches it the first time. Triton also launches everything under an untested
    release, in the interpreter, and while a profiler listens.
    """

    def __init__(self, kernel: Callable):
        self.kernel = kernel
        self._programs = {}
        self._direct = _KNOWN and isinstance(kernel, JITFunction)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable:
        return lambda *arguments, **constants: self._launch(grid, arguments, constants)

    def _launch(
        self, grid: tuple[int, ...], arguments: tuple[Tensor | int | float | None, ...], constants: dict
    ) -> None:
        hooks = triton.knobs.runtime if self._direct else None
        if hooks is None or hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls:
            self.kernel[grid](*arguments, **constants)
            return
        driver = triton.runtime.driver.active
        device = driver.get_current_device()
        # What Triton compiles programs for: types, whether an address is a multiple of 16 and a number fits in 32 bits,
        # and constants.
        key = [device, *constants.values()]
        for argument in arguments:
            if argument is None:
                key.append(None)
            elif type(argument) is int:
                key.append(argument > _LARGEST_INT32)
            elif type(argument) is float:
                key.append(float)
            else:
                key.append(argument.dtype)
                key.append(argument.data_ptr() % 16 == 0)
        key = tuple(key)
        known = self._programs.get(key)
        if known is None:
            hash_callees(self.kernel)
            program = self.kernel[grid](*arguments, **constants)
            names = self.kernel.arg_names[len(arguments) :]
            self._programs[key] = (program, tuple(constants[name] for name in names))
            return
        program, values = known
        program.run(
            grid[0], grid[1] if len(grid) > 1 else 1, 1, driver.get_current_stream(device),
            program.function, program.packed_metadata, None, None, None, *arguments, *values,
        )  # fmt: skip


def kernel(*numbers: str) -> Callable[[Callable], Launcher]:
    """Decorator of a Triton kernel: a launcher of it. `numbers` are its parameters that are integers, by name."""
    return lambda function: Launcher(triton.jit(function, do_not_specialize=numbers))
