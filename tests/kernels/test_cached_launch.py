"""A Launcher starts the program that Triton would start."""

import ast
import itertools
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from pylate_fastmaxsim import kernels  # noqa: E402
from pylate_fastmaxsim.kernels.runtime.cached_launch import Launcher  # noqa: E402
from tests.support.compiled import launchers  # noqa: E402

SIZE = 32


@Launcher
@triton.jit(do_not_specialize=["number"])
def sum_kernel(values, more, number, out, SIZE: tl.constexpr, SIGN: tl.constexpr, NAME: tl.constexpr):
    place = tl.arange(0, SIZE)
    total = tl.load(values + place).to(tl.int64) + SIGN * number
    if more is not None:
        total += tl.load(more + place)
    if NAME == "twice":
        total *= 2
    tl.store(out + tl.program_id(0) * SIZE + tl.program_id(1) * 2 * SIZE + place, total)


def launched(case, grid=(1,)):
    dtype, offset, with_more, number, size, sign, name, warps = case
    values = torch.arange(SIZE + offset, device="cuda", dtype=dtype)[offset:]
    more = torch.arange(SIZE, device="cuda") * 100 if with_more else None
    out = torch.zeros(8 * SIZE, dtype=torch.int64, device="cuda")
    sum_kernel[grid](values, more, number, out, SIZE=size, SIGN=sign, NAME=name, num_warps=warps)
    total = values[:size].long() + sign * number + (more[:size] if with_more else 0)
    return out, total * 2 if name == "twice" else total


@pytest.mark.cuda
def test_every_kind_of_argument_finds_its_program():
    constants = [(16, 1, "once", 1), (SIZE, 1, "once", 1), (SIZE, -1, "once", 4), (SIZE, -1, "twice", 4)]
    dtypes, numbers = (torch.int32, torch.float32), (1, 16, 2**31 - 1, 2**31)
    cases = itertools.product(dtypes, (0, 1), (False, True), numbers, constants)
    cases = [(*arguments, *chosen) for *arguments, chosen in cases]
    random.Random(0).shuffle(cases)
    for _ in range(2):  # compiled, then found
        for case in cases:
            out, expected = launched(case)
            assert torch.equal(out[: len(expected)], expected), case
            assert not out[len(expected) :].any(), case
        out, expected = launched((torch.int64, 0, False, 1, SIZE, 1, "once", 1), grid=(2, 3))
        assert torch.equal(out[: 6 * SIZE], expected.repeat(6)) and not out[6 * SIZE :].any()


@pytest.mark.cuda
def test_profilers_hear_of_every_launch():
    if not hasattr(triton, "knobs"):
        pytest.skip("this release of Triton has no hooks to listen by")
    case = (torch.int64, 0, False, 1, SIZE, 1, "once", 1)
    launched(case)
    heard = []
    hook = heard.append
    triton.knobs.runtime.launch_enter_hook.add(hook)
    try:
        out, expected = launched(case)
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(hook)
    assert [metadata.get()["name"] for metadata in heard] == ["sum_kernel"]
    assert torch.equal(out[:SIZE], expected)


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_each_gpu_has_a_program_of_its_own():
    case = (torch.int64, 0, True, 7, SIZE, 1, "once", 1)
    for device in (0, 1, 0, 1):
        with torch.cuda.device(device):
            out, expected = launched(case)
            assert out.device.index == device and torch.equal(out[:SIZE], expected)


def constants_of_launches():
    """Of each kernel, what its launches name after the positional arguments, in the order of each call."""
    found = {}
    for path in Path(kernels.__path__[0]).rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_text())):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Subscript):
                names = tuple(keyword.arg or ast.unparse(keyword.value) for keyword in call.keywords)
                found.setdefault(ast.unparse(call.func.value), set()).add(names)
    return found


def test_all_launches_of_a_kernel_name_its_constants_in_one_order():
    # A program is found by their values alone.
    launches = constants_of_launches()
    assert {launcher.kernel.fn.__name__ for launcher in launchers()} <= set(launches)
    assert {kernel: orders for kernel, orders in launches.items() if len(orders) > 1} == {}


def test_the_key_of_a_kernel_does_not_depend_on_the_kernels_before_it():
    """Or a warm-up, whose processes compile kernels in other orders, would compile them in vain."""
    names = ["maxsim.forward.forward_kernel", "pooled.top_many_forward.top_many_kernel"]
    script = f"""
import importlib, sys
from pylate_fastmaxsim.kernels.runtime.cached_launch import hash_callees
kernels = []
for name in {names}[:: int(sys.argv[1])]:
    module, _, kernel = name.rpartition(".")
    kernels.append(getattr(importlib.import_module("pylate_fastmaxsim.kernels." + module), kernel).kernel)
    hash_callees(kernels[-1])
print(sorted(kernel.cache_key for kernel in kernels))
"""
    keys = {
        subprocess.run([sys.executable, "-c", script, step], capture_output=True, text=True, check=True).stdout
        for step in ("1", "-1")
    }
    assert len(keys) == 1
