"""Every kernel compiles for every GPU architecture of the tables, on a machine without a GPU, and spills nothing."""

import re
import subprocess

import pytest

triton = pytest.importorskip("triton")
compiler = pytest.importorskip("triton.compiler")

from triton.backends.compiler import GPUTarget  # noqa: E402

from pylate_fastmaxsim.kernels import launch  # noqa: E402
from pylate_fastmaxsim.kernels.document_gradient import (  # noqa: E402
    candidate_document_gradient_kernel,
    document_gradient_kernel,
    row_query_kernel,
)
from pylate_fastmaxsim.kernels.forward import forward_kernel, live_tokens_kernel  # noqa: E402
from pylate_fastmaxsim.kernels.query_gradient import query_gradient_kernel  # noqa: E402

pytestmark = pytest.mark.skipif(
    not isinstance(forward_kernel, triton.runtime.JITFunction), reason="kernels are interpreted in this process"
)

SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
# Where it lets one more block fit on a multiprocessor, ptxas parks a few values that live across a loop even
# with registers to spare, and which kernels it does that to changes with every edit. More than that would be
# a spill inside the loop. The 16-bit kernels of the GPU that the tiles were measured on spill nothing.
PARKED_BYTES = 0
ELEMENT = {"bf16": "*bf16", "fp16": "*fp16", "ieee": "*fp32", "tf32x3": "*fp32", "tf32": "*fp32"}
TYPES = dict.fromkeys(["q_keep", "d_keep", "zero_floor"], "*u8") | {
    "scores": "*fp32",
    "grad_scores": "*fp32",
    "winners": "*i16",
    "buckets": "*i16",
    "row_query": "*i32",
    "live_tokens": "*i32",
    "live_lengths": "*i32",
}
POINTERS = ["q_starts", "q_lengths", "d_starts", "d_lengths", "candidates", "pairs", "pair_offsets"]
SIZES = ["num_queries", "num_documents", "num_slots", "num_tiles", "num_rows", "row_blocks", "tiles_per_document"]


def compiled(kernel, arch, operand, num_warps, num_stages, absent=(), **constants):
    """PTX and shared memory of a kernel, called the way maxsim.py calls it; `absent` pointers are None."""
    types = TYPES | dict.fromkeys(POINTERS, "*i64") | dict.fromkeys(SIZES, "i32")
    types |= dict.fromkeys(["q_values", "d_values", "grad_q", "grad_d"], ELEMENT[operand])
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    constants |= dict.fromkeys(set(absent) & set(kernel.arg_names))
    signature = {name: "constexpr" if name in constants else types[name] for name in kernel.arg_names}
    aligned = {
        (i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names) if signature[name].startswith("*")
    }
    source = compiler.ASTSource(kernel, signature, constants, aligned)
    options = {"num_warps": num_warps, "num_stages": num_stages}
    result = compiler.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    return result.asm["ptx"], result.metadata.shared


def check(arch, operand, ptx, shared, directory):
    from triton.backends.nvidia.compiler import get_ptxas

    (directory / "kernel.ptx").write_text(ptx)
    target = re.search(r"\.target (sm_\w+)", ptx).group(1)
    run = subprocess.run(
        [get_ptxas(arch).path, "-v", f"--gpu-name={target}", "kernel.ptx", "-o", "kernel.o"],
        cwd=directory,
        capture_output=True,
        text=True,
        check=True,
    )
    spilled = [int(n) for n in re.findall(r"(\d+) bytes spill", run.stderr)]
    assert spilled and max(spilled) <= (0 if arch == 90 and kind(operand) == "half" else PARKED_BYTES), run.stderr
    assert shared <= SHARED_MEMORY[arch]
    if operand == "ieee":
        assert "tf32" not in ptx, "float32 at the highest precision must not be rounded to TF32"
    return ptx


def kind(operand):
    return "half" if operand in ("bf16", "fp16") else operand


CASES = [("bf16", 128), ("bf16", 96), ("bf16", 256), ("bf16", 768), ("fp16", 128)]
CASES += [("ieee", 128), ("ieee", 100), ("tf32x3", 128), ("tf32", 128)]
MASKS = ("q_keep", "live_tokens", "zero_floor")


@pytest.mark.parametrize("arch", launch.ARCHITECTURES)
@pytest.mark.parametrize("operand, dim", CASES)
@pytest.mark.parametrize("layout", ["short", "long", "candidates"])
def test_forward(arch, operand, dim, layout, tmp_path):
    if layout == "long" and (operand, dim) not in CASES[::3]:
        pytest.skip("long queries differ from short ones by a loop: a few cases are enough")
    tile = launch.forward_tiles(arch, kind(operand), dim, 32 if layout == "candidates" else 4096)
    absent = {"short": ("candidates", *MASKS), "long": ("candidates",), "candidates": ()}[layout]
    ptx, shared = compiled(
        forward_kernel,
        arch,
        operand,
        tile.num_warps,
        tile.num_stages,
        absent,
        DIM=dim,
        SLOT=tile.block_m if layout == "long" else min(32, tile.block_m),
        LONG_QUERIES=layout == "long",
        WANT_WINNERS=True,
        SENTINEL=-1,
        PRECISION=launch.INPUT_PRECISION["highest"] if operand in ("bf16", "fp16") else operand,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        DOCUMENTS_PER_PROGRAM=tile.documents_per_program,
    )
    check(arch, operand, ptx, shared, tmp_path)
    if layout == "short" and kind(operand) == "half":
        unit = {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}[arch]
        assert unit in ptx


@pytest.mark.parametrize("arch", launch.ARCHITECTURES)
@pytest.mark.parametrize("operand, dim", [("bf16", 128), ("fp16", 768), ("ieee", 128)])
@pytest.mark.parametrize("absent", [("candidates",), ()], ids=["all", "candidates"])
def test_query_gradient(arch, operand, dim, absent, tmp_path):
    tile = launch.query_gradient_tiles(arch, kind(operand), dim)
    ptx, shared = compiled(
        query_gradient_kernel,
        arch,
        operand,
        tile.num_warps,
        3,
        absent,
        DIM=dim,
        SENTINEL=-1,
        BLOCK_ROWS=tile.block_rows,
        BLOCK_D=tile.block_d,
        UNROLL=tile.unroll,
    )
    check(arch, operand, ptx, shared, tmp_path)


@pytest.mark.parametrize("arch", launch.ARCHITECTURES)
@pytest.mark.parametrize(
    "operand, dim", [("bf16", 128), ("bf16", 768), ("fp16", 128), ("fp16", 96), ("ieee", 128), ("ieee", 100), ("tf32x3", 128), ("tf32", 128)]
)  # fmt: skip
@pytest.mark.parametrize("kernel", [document_gradient_kernel, candidate_document_gradient_kernel], ids=["all", "candidates"])  # fmt: skip
def test_document_gradient(arch, operand, dim, kernel, tmp_path):
    tile = launch.document_gradient_tiles(arch, kind(operand), dim)
    ptx, shared = compiled(
        kernel,
        arch,
        operand,
        tile.num_warps,
        tile.num_stages,
        DIM=dim,
        SENTINEL=-1,
        PRECISION="ieee" if operand in ("bf16", "fp16") else operand,
        BLOCK_T=tile.block_t,
        BLOCK_R=tile.block_r,
        BLOCK_D=tile.block_d,
        BLOCK_SCAN=tile.block_scan,
    )
    check(arch, operand, ptx, shared, tmp_path)


@pytest.mark.parametrize("arch", launch.ARCHITECTURES)
def test_helpers(arch, tmp_path):
    check(arch, "bf16", *compiled(row_query_kernel, arch, "bf16", 1, 3, BLOCK=128), tmp_path)
    check(arch, "bf16", *compiled(live_tokens_kernel, arch, "bf16", 2, 3, BLOCK=256), tmp_path)


def test_tiles_shrink_to_the_input():
    tiles = launch.forward_tiles(90, "half", 48, 5)
    assert (tiles.block_m, tiles.block_k) == (16, 64)
    assert launch.document_gradient_tiles(90, "half", 7).block_d == 16
    assert launch.query_gradient_tiles(90, "half", 1).block_d == 1
