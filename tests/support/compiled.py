"""Compiles programs that operators launch ahead of time, for GPUs that this machine does not have."""

import importlib
import pkgutil
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

from triton import compiler
from triton.backends import nvidia
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import type_canonicalisation_dict

from pylate_fastmaxsim import kernels
from pylate_fastmaxsim.kernels.runtime.cached_launch import RELEASE, Launcher

CUOBJDUMP = Path(nvidia.__file__).with_name("bin") / "cuobjdump"
SHARED_MEMORY = {80: 163 * 1024, 86: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
MATRIX_UNIT = {80: "mma.sync", 86: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma", 120: "mma.sync"}


def launchers() -> Iterator[Launcher]:
    """Of all kernels of the package."""
    for module in pkgutil.walk_packages(kernels.__path__, f"{kernels.__name__}."):
        for value in vars(importlib.import_module(module.name)).values():
            if isinstance(value, Launcher) and value.kernel.fn.__module__ == module.name:
                yield value


def compiled(program: tuple, arch: int) -> compiler.CompiledKernel:
    """A program of `recorded_launches`, for another architecture than that of this machine."""
    _, kinds, constants, launcher = program
    names, constants = launcher.kernel.arg_names, dict(constants)
    options = {name: constants.pop(name) for name in constants.keys() - set(names)}
    signature, aligned = dict.fromkeys(names, "constexpr"), {}
    for place, (name, (kind, flag)) in enumerate(zip(names, kinds, strict=False)):
        if kind is type(None):
            constants[name] = None
        elif kind in (int, float):
            signature[name] = "fp32" if kind is float else "i64" if flag else "i32"
        else:
            signature[name] = "*" + type_canonicalisation_dict[str(kind).removeprefix("torch.")]
            aligned |= {(place,): [["tt.divisibility", 16]]} if flag else {}
    source = compiler.ASTSource(launcher.kernel, signature, constants, aligned)
    return compiler.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def fits(program: tuple, arch: int, directory: Path, may_spill: bool = False) -> str:
    """PTX of a program that fits the GPU, spills nothing, and rounds float32 to TF32 only where that is asked for.

    Spills are looked at in the release of Triton that the tiles were chosen for. Others allot registers otherwise.
    """
    made = compiled(program, arch)
    assert made.metadata.shared <= SHARED_MEMORY[arch], program
    assert ("PRECISION", "tf32") in program[2] or "tf32" not in made.asm["ptx"], program
    if RELEASE == (3, 6) and not may_spill:
        (directory / "kernel.cubin").write_bytes(made.asm["cubin"])
        command = [CUOBJDUMP, "-res-usage", "kernel.cubin"]
        usage = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=True).stdout
        # Where registers do not suffice, numbers wait on the stack of a thread.
        assert re.findall(r"STACK:(\d+) .* LOCAL:(\d+)", usage) == [("0", "0")], (program, usage)
    return made.asm["ptx"]
