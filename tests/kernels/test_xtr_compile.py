"""The kernels of XTR scores compile for every GPU architecture of the tables, and spill nothing."""

import pytest
import torch

pytest.importorskip("triton")

from test_maxsim_compile import CASES, check, compiled, kind, precision  # noqa: E402
from test_maxsim_compile import pytestmark as pytestmark  # noqa: E402

from pylate_fastmaxsim.kernels.primitives.live_rows import live_rows_kernel  # noqa: E402
from pylate_fastmaxsim.kernels.runtime import arch as gpu  # noqa: E402
from pylate_fastmaxsim.kernels.xtr import tiles as xtr_tiles  # noqa: E402
from pylate_fastmaxsim.kernels.xtr.kth_largest import (  # noqa: E402
    bisect_kernel,
    bound_kernel,
    collect_kernel,
    select_kernel,
)
from pylate_fastmaxsim.kernels.xtr.scores import xtr_scores_kernel  # noqa: E402
from pylate_fastmaxsim.kernels.xtr.token_maxima import negative_maxima_kernel, token_maxima_kernel  # noqa: E402


@pytest.mark.parametrize("arch", gpu.ARCHITECTURES)
@pytest.mark.parametrize("operand, dim, rows", [(*case, 4096) for case in CASES] + [(*case, 32) for case in CASES[::3]])
def test_maxima(arch, operand, dim, rows, tmp_path):
    tile = xtr_tiles.maxima_tiles(arch, kind(operand), dim, rows)
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages, "maxnreg": tile.max_registers}
    constants = {
        "DIM": dim,
        "WANT_WINNERS": True,
        "PRECISION": precision(operand),
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
    }
    ptx, shared = compiled(token_maxima_kernel, arch, operand, options, **constants)
    check(arch, operand, ptx, shared, tmp_path)
    if rows == 4096 and kind(operand) == "half":
        assert {90: "wgmma.mma_async", 100: "tcgen05.mma"}.get(arch, "mma.sync") in ptx
    check(arch, operand, *compiled(negative_maxima_kernel, arch, operand, options, **constants), tmp_path)


@pytest.mark.parametrize("arch", gpu.ARCHITECTURES)
@pytest.mark.parametrize(
    "kernel, operand, dim, rows",
    [(kernel, *case, 4096) for kernel in (collect_kernel, bisect_kernel) for case in CASES]
    + [(collect_kernel, *case, 32) for case in CASES[::3]],
)
def test_kth_largest(arch, kernel, operand, dim, rows, tmp_path):
    tile = xtr_tiles.collect_tiles(arch, kind(operand), dim, rows)
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    if kernel is bisect_kernel:
        options["maxnreg"] = gpu.ALL_REGISTERS
    ptx, shared = compiled(
        kernel,
        arch,
        operand,
        options,
        DIM=dim,
        PRECISION=precision(operand),
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=xtr_tiles.maxima_tiles(arch, kind(operand), dim, rows).block_k,
    )
    check(arch, operand, ptx, shared, tmp_path)
    if kind(operand) == "half":
        assert {90: "wgmma.mma_async", 100: "tcgen05.mma"}.get(arch, "mma.sync") in ptx, "another unit than the maxima"


@pytest.mark.parametrize("arch", gpu.ARCHITECTURES)
def test_helpers(arch, tmp_path):
    for kernel, block, warps in ((bound_kernel, 4096, 4), (select_kernel, 2048, 4), (live_rows_kernel, 256, 2)):
        check(arch, "bf16", *compiled(kernel, arch, "bf16", {"num_warps": warps}, BLOCK=block), tmp_path)
    for winners in (torch.uint8, torch.int16):
        for count_retrieved in (False, True):
            sizes = {"WANT_WINNERS": True, "COUNT_RETRIEVED": count_retrieved, "BLOCK_S": 16, "BLOCK_R": 32}
            options = {"num_warps": 4, "maxnreg": gpu.ALL_REGISTERS}
            scores = compiled(xtr_scores_kernel, arch, "bf16", options, winners=winners, **sizes)
            check(arch, "bf16", *scores, tmp_path)


def test_without_what_may_be_absent(tmp_path):
    tile = xtr_tiles.maxima_tiles(90, "half", 128, 4096)
    sizes = {"DIM": 128, "PRECISION": precision("bf16"), "BLOCK_M": tile.block_m, "BLOCK_N": 64, "BLOCK_K": 128}
    sizes |= {"BLOCK_S": 16, "BLOCK_R": 32, "BLOCK": 256, "WANT_WINNERS": False, "COUNT_RETRIEVED": False}
    absent = ("groups", "live_tokens", "q_keep", "candidates", "zero_floor")
    for kernel in (token_maxima_kernel, negative_maxima_kernel, live_rows_kernel, xtr_scores_kernel):
        options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
        check(90, "bf16", *compiled(kernel, 90, "bf16", options, absent, **sizes), tmp_path)
