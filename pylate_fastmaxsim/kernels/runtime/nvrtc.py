"""CUDA C++ that is compiled at run time by NVRTC, which PyTorch's CUDA wheels bring, and kept in a folder of the user."""

import ctypes
import hashlib
import os
from contextlib import suppress
from pathlib import Path

import torch
import triton
from cuda.bindings import driver, nvrtc
from torch import Tensor

from pylate_fastmaxsim.files.replace import replace_file

_BITS = 2**64 - 1


class CudaKernels:
    """The kernels of a file of CUDA C++, with numbers that are defined for it. Each GPU architecture is compiled for once.

    The compiled code is kept in ``$XDG_CACHE_HOME/pylate_fastmaxsim`` (``~/.cache`` by default) where that can be written.
    """

    def __init__(self, file: Path, defined: dict[str, int | float]):
        self._source = file.read_text(encoding="utf-8")
        self._file = file.name
        self._options = ["--std=c++17", *(f"-D{name}={number}" for name, number in defined.items())]
        self._functions = {}
        self._binaries: dict[str, bytes] = {}

    def compile(self, device: torch.device) -> None:
        """Compile for a device now and not at the first launch; RuntimeError if NVRTC cannot."""
        self._binary(device.index)

    def launch(
        self,
        name: str,
        grid: tuple[int, int],
        threads: int,
        arguments: list[Tensor | int | None],
        shared_bytes: int = 0,
    ) -> None:
        """Run a kernel on the current device and stream. Integers are passed as ``int``, tensors as addresses."""
        # Each in eight bytes, of which the driver reads as many as the parameter has.
        values = (ctypes.c_uint64 * len(arguments))(
            *(
                argument & _BITS if isinstance(argument, int) else 0 if argument is None else argument.data_ptr()
                for argument in arguments
            )
        )
        first = ctypes.addressof(values)
        addresses = (ctypes.c_void_p * len(arguments))(*range(first, first + 8 * len(arguments), 8))
        # As Triton asks for them, which takes a fraction of the time of torch.cuda.current_stream.
        active = triton.runtime.driver.active
        device = active.get_current_device()
        stream = active.get_current_stream(device)
        function = self._function(name, device, shared_bytes)
        _checked(
            driver.cuLaunchKernel(
                function, *grid, 1, threads, 1, 1, shared_bytes, stream, ctypes.addressof(addresses), 0
            )
        )

    def _function(self, name: str, device: int, shared_bytes: int):
        key = (name, device)
        if key not in self._functions:
            if device not in self._functions:
                self._functions[device] = _checked(driver.cuModuleLoadData(self._binary(device)))
            function = _checked(driver.cuModuleGetFunction(self._functions[device], name.encode()))
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            _checked(driver.cuFuncSetAttribute(function, attribute, shared_bytes))
            self._functions[key] = function
        return self._functions[key]

    def _binary(self, device: int | None) -> bytes:
        major, minor = torch.cuda.get_device_capability(device)
        architecture = f"--gpu-architecture=sm_{major}{minor}"
        if architecture not in self._binaries:
            self._binaries[architecture] = self._compiled([*self._options, architecture])
        return self._binaries[architecture]

    def _compiled(self, options: list[str]) -> bytes:
        version = _checked(nvrtc.nvrtcVersion())
        digest = hashlib.sha256("\0".join([self._source, *options, str(version)]).encode()).hexdigest()
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "pylate_fastmaxsim")
        kept = cache / f"{Path(self._file).stem}_{digest[:32]}.cubin"
        if kept.is_file():
            return kept.read_bytes()
        binary = compiled(self._source, self._file, options)
        # A home that cannot be written: compiled again in the next process, which takes half a second.
        with suppress(OSError):
            kept.parent.mkdir(parents=True, exist_ok=True)
            replace_file(kept, binary)  # in one step, since processes of several ranks compile at the same time
        return binary


def compiled(source: str, name: str, options: list[str]) -> bytes:
    """The machine code of CUDA C++ for the architecture in ``options``."""
    program = _checked(nvrtc.nvrtcCreateProgram(source.encode(), name.encode(), 0, [], []))
    encoded = [option.encode() for option in options]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        log = b" " * _checked(nvrtc.nvrtcGetProgramLogSize(program))
        nvrtc.nvrtcGetProgramLog(program, log)
        raise RuntimeError(f"NVRTC cannot compile {name} ({status.name}): {log.decode().strip()}")
    binary = b" " * _checked(nvrtc.nvrtcGetCUBINSize(program))
    _checked(nvrtc.nvrtcGetCUBIN(program, binary))
    _checked(nvrtc.nvrtcDestroyProgram(program))
    return binary


def _checked(result: tuple):
    """The results of a call of the driver or of NVRTC; RuntimeError for a status that is an error."""
    status, *values = result
    if int(status) != 0:
        raise RuntimeError(f"CUDA: {status.name}")
    return values[0] if len(values) == 1 else tuple(values)
