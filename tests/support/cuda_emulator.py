"""Kernels of a file of CUDA C++, run on a CPU by `cuda_emulator.h`, in the place of `runtime.nvrtc.CudaKernels`."""

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from torch import Tensor

HEADER = Path(__file__).with_name("cuda_emulator.h")


class EmulatedKernels:
    """Compiles with g++ into ``folder``; tensors are on a CPU."""

    def __init__(self, file: Path, defined: dict[str, int | float], folder: Path):
        source = file.read_text(encoding="utf-8")
        # A return type and attributes stand before the name.
        names = re.findall(r"__global__ void [^{]*?(\w+)\s*\(\s*(?:const|BLOCK_ARGUMENTS)", source)
        entries = "".join(
            f'extern "C" void emulate_{name}(int x, int y, int threads, const uint64_t* slots) '
            f"{{ run_blocks({name}, x, y, threads, slots); }}\n"
            for name in names
        )
        program = folder / "emulated.cpp"
        program.write_text(f'#include "{HEADER}"\n#include "{file}"\n{entries}')
        library = folder / "emulated.so"
        options = [f"-D{name}={number}" for name, number in defined.items()]
        command = ["g++", "-O2", "-std=c++17", "-w", "-shared", "-fPIC", *options, "-o", library, program]
        subprocess.run(command, check=True)
        self._library = ctypes.CDLL(str(library))

    def launch(
        self,
        name: str,
        grid: tuple[int, int],
        threads: int,
        arguments: list[Tensor | int | None],
        shared_bytes: int = 0,
    ) -> None:
        values = [
            0 if argument is None else argument.data_ptr() if isinstance(argument, Tensor) else argument
            for argument in arguments
        ]
        slots = (ctypes.c_uint64 * len(values))(*(value & (2**64 - 1) for value in values))
        getattr(self._library, f"emulate_{name}")(*grid, threads, slots)


def emulated_engine(folder: Path, documents: int, threads: int):
    """The ``CudaEngine`` of sparse search with emulated kernels, for blocks of ``documents``."""
    from pylate_fastmaxsim.kernels.sparse.cuda_engine import SOURCE, CudaEngine, definitions

    if shutil.which("g++") is None:
        pytest.skip("the emulator is compiled with g++, which is not there")
    return CudaEngine(EmulatedKernels(SOURCE, definitions(documents, threads), folder), documents, threads)
