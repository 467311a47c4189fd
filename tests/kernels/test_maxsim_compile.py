"""Every kernel compiles for every GPU architecture of the tables, on a machine without a GPU, and spills nothing.

The last holds for the release of Triton that the tiles were chosen for.
"""

import inspect
import re
import subprocess
from typing import NamedTuple

import pytest
import torch

triton = pytest.importorskip("triton")
compiler = pytest.importorskip("triton.compiler")

from triton.backends.compiler import GPUTarget  # noqa: E402

from pylate_fastmaxsim._winners import no_winner  # noqa: E402
from pylate_fastmaxsim.kernels.maxsim import tiles as maxsim_tiles  # noqa: E402
from pylate_fastmaxsim.kernels.maxsim.candidate_order import candidate_order_kernel  # noqa: E402
from pylate_fastmaxsim.kernels.maxsim.document_gradient import (  # noqa: E402
    candidate_document_gradient_kernel,
    document_gradient_kernel,
)
from pylate_fastmaxsim.kernels.maxsim.forward import forward_kernel  # noqa: E402
from pylate_fastmaxsim.kernels.maxsim.query_gradient import query_gradient_kernel  # noqa: E402
from pylate_fastmaxsim.kernels.maxsim.winner_buckets import count_kernel, place_kernel, row_query_kernel  # noqa: E402
from pylate_fastmaxsim.kernels.primitives.live_rows import live_tokens_kernel  # noqa: E402
from pylate_fastmaxsim.kernels.runtime.arch import ARCHITECTURES, INPUT_PRECISION  # noqa: E402
from pylate_fastmaxsim.kernels.runtime.triton_version import RELEASE  # noqa: E402
from pylate_fastmaxsim.kernels.xtr.tiles import maxima_tiles  # noqa: E402

pytestmark = pytest.mark.skipif(
    not isinstance(forward_kernel.kernel, triton.runtime.JITFunction), reason="kernels are interpreted in this process"
)

SHARED_MEMORY = {80: 163 * 1024, 86: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
ELEMENT = {"bf16": "*bf16", "fp16": "*fp16", "bf16x6": "*fp32", "bf16x3": "*fp32", "tf32": "*fp32"}
WINNERS = {torch.uint8: "*u8", torch.int16: "*i16"}
TYPES = dict.fromkeys(["q_keep", "d_keep", "keep", "zero_floor"], "*u8") | {
    "scores": "*fp32",
    "grad_scores": "*fp32",
    "buckets": "*i32",
    "weights": "*fp32",
    "counts": "*i32",
    "begins": "*i32",
    "row_query": "*i32",
    "live_tokens": "*i32",
    "live_lengths": "*i32",
    "groups": "*i16",
}
TYPES |= dict.fromkeys(["maxima", "thresholds", "sums", "divisors", "log_sums"], "*fp32")
TYPES |= dict.fromkeys(
    ["rows", "q_rows", "d_rows", "bounds", "pending", "pool", "cu_seqlens", "key_cu_seqlens"], "*i32"
)
TYPES |= dict.fromkeys(["inverse_norms", "squares", "bias", "scales", "shifts", "grad_weights", "grad_biases"], "*fp32")
VECTORS = ["q_values", "d_values", "grad_q", "grad_d", "hidden", "weight", "embeddings", "grad", "grad_hidden"]
VECTORS += ["q_states", "k_states", "v_states", "out", "grad_k", "grad_v"]
POINTERS = ["q_starts", "q_lengths", "d_starts", "d_lengths", "candidates", "pairs", "pair_offsets"]
POINTERS += ["starts", "lengths", "offsets", "q_offsets", "d_offsets"]
SIZES = [
    "num_queries", "num_documents", "num_slots", "num_tiles", "num_rows", "num_chunks", "num_pairs",
    "first_document", "documents_per_program", "row_blocks", "tiles_per_document", "programs_per_document", "first_row", "num_groups",
    "rows_per_part", "num_parts", "slot_blocks", "capacity", "k", "q_head", "k_head", "v_head", "grad_head", "reach",
]  # fmt: skip


def compiled(launcher, arch, operand, options, absent=(), winners=torch.uint8, **constants):
    """PTX and shared memory of a kernel, called the way maxsim.py calls it; `absent` pointers are None."""
    kernel = launcher.kernel
    types = TYPES | dict.fromkeys(POINTERS, "*i64") | dict.fromkeys(SIZES, "i32")
    types |= dict.fromkeys(["winners", "token_winners"], WINNERS[winners])
    constants["SENTINEL"] = no_winner(winners)
    types |= dict.fromkeys(VECTORS, ELEMENT[operand])
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    constants |= dict.fromkeys(set(absent) & set(kernel.arg_names))
    signature = {name: "constexpr" if name in constants else types[name] for name in kernel.arg_names}
    aligned = {
        (i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names) if signature[name].startswith("*")
    }
    source = compiler.ASTSource(kernel, signature, constants, aligned)
    result = compiler.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    return result.asm["ptx"], result.metadata.shared


def ptxas(arch):
    """Path of the assembler that this release of Triton brings."""
    from triton.backends.nvidia.compiler import get_ptxas

    found = get_ptxas(*[arch][: len(inspect.signature(get_ptxas).parameters)])
    return found[0] if isinstance(found, tuple) else found.path


def check(arch, operand, ptx, shared, directory):
    (directory / "kernel.ptx").write_text(ptx)
    target = re.search(r"\.target (sm_\w+)", ptx).group(1)
    run = subprocess.run(
        [ptxas(arch), "-v", f"--gpu-name={target}", "kernel.ptx", "-o", "kernel.o"],
        cwd=directory,
        capture_output=True,
        text=True,
        check=True,
    )
    # The tiles were chosen for this release; others hold more or less of the same kernel in registers.
    if RELEASE == (3, 6):
        spilled = [int(n) for n in re.findall(r"(\d+) bytes spill", run.stderr)]
        assert max(spilled) == 0, run.stderr
    assert shared <= SHARED_MEMORY[arch]
    if operand != "tf32":
        assert "tf32" not in ptx, "only float32 at medium precision may be rounded to TF32"


def kind(operand):
    return "half" if operand in ("bf16", "fp16") else operand


def precision(operand):
    return INPUT_PRECISION["highest"] if kind(operand) == "half" else operand


CASES = [("bf16", 128), ("bf16", 96), ("bf16", 256), ("bf16", 768), ("fp16", 128)]
CASES += [("bf16x6", 128), ("bf16x6", 100), ("bf16x6", 768), ("bf16x3", 128), ("tf32", 128)]
MASKS = ("q_keep", "live_tokens", "zero_floor")


class Batch(NamedTuple):
    """What the compiled forward depends on, besides the vectors."""

    rows: int
    long_queries: bool = False
    candidates: bool = False
    masks: bool = False
    winners: torch.dtype | None = torch.uint8


# Each pair of properties occurs once at least.
BATCHES = {
    "training": Batch(4096),
    "masked-training": Batch(4096, masks=True),
    "scoring": Batch(4096, masks=True, winners=None),
    "long-training": Batch(4096, long_queries=True, masks=True, winners=torch.int16),
    "long-scoring": Batch(4096, long_queries=True, winners=None),
    "candidates-training": Batch(32, candidates=True, masks=True),
    "candidates-scoring": Batch(32, candidates=True, winners=None),
}


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("operand, dim", CASES)
@pytest.mark.parametrize("name", BATCHES)
def test_forward(arch, operand, dim, name, tmp_path):
    if name in ("long-scoring", "masked-training") and (operand, dim) not in CASES[::3]:
        pytest.skip("a few cases are enough for what the other batches cover already")
    batch = BATCHES[name]
    query_rows = batch.rows if batch.long_queries else 32
    tile = maxsim_tiles.forward_tiles(arch, kind(operand), dim, batch.rows, batch.winners is not None, query_rows)
    absent = (() if batch.candidates else ("candidates",)) + (() if batch.masks else MASKS)
    absent += () if batch.winners else ("winners",)
    ptx, shared = compiled(
        forward_kernel,
        arch,
        operand,
        {"num_warps": tile.num_warps, "num_stages": tile.num_stages, "maxnreg": tile.max_registers},
        absent,
        batch.winners or torch.uint8,
        DIM=dim,
        ROWS_PER_QUERY=32,
        ONE_QUERY=batch.candidates or batch.long_queries,
        WANT_WINNERS=batch.winners is not None,
        PRECISION=precision(operand),
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
    )
    check(arch, operand, ptx, shared, tmp_path)
    if name == "training" and kind(operand) == "half":
        unit = {90: "wgmma.mma_async", 100: "tcgen05.mma"}.get(arch, "mma.sync")
        assert unit in ptx


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("operand, dim", [("bf16", 128), ("bf16", 768), ("bf16x6", 128)])
@pytest.mark.parametrize("absent", [("candidates",), ("row_query",)], ids=["all", "candidates"])
def test_query_gradient(arch, operand, dim, absent, tmp_path):
    tile = maxsim_tiles.query_gradient_tiles(arch, kind(operand), dim)
    ptx, shared = compiled(
        query_gradient_kernel,
        arch,
        operand,
        {"num_warps": tile.num_warps},
        absent,
        DIM=dim,
        BLOCK_ROWS=tile.block_rows,
        BLOCK_D=tile.block_d,
        UNROLL=tile.unroll,
    )
    check(arch, operand, ptx, shared, tmp_path)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("operand, dim", CASES)
def test_document_gradient(arch, operand, dim, tmp_path):
    tile = maxsim_tiles.document_gradient_tiles(arch, kind(operand), dim)
    ptx, shared = compiled(
        document_gradient_kernel,
        arch,
        operand,
        {"num_warps": tile.num_warps, "num_stages": tile.num_stages},
        DIM=dim,
        WRITE_ZEROS=False,
        PRECISION=precision(operand),
        BLOCK_T=tile.block_t,
        BLOCK_R=tile.block_r,
        BLOCK_D=tile.block_d,
    )
    check(arch, operand, ptx, shared, tmp_path)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("operand, dim", CASES)
@pytest.mark.parametrize("write_zeros", [False, True], ids=["zeros-there", "zeros-written"])
@pytest.mark.parametrize("absent", [(), ("pairs", "pair_offsets")], ids=["ordered", "scanned"])
def test_candidate_document_gradient(arch, operand, dim, absent, write_zeros, tmp_path):
    tile = maxsim_tiles.candidate_gradient_tiles(arch, kind(operand), dim)
    ptx, shared = compiled(
        candidate_document_gradient_kernel,
        arch,
        operand,
        {"num_warps": tile.num_warps, "num_stages": tile.num_stages, "maxnreg": tile.max_registers},
        absent,
        DIM=dim,
        SHORT_QUERIES=True,
        WRITE_ZEROS=write_zeros,
        PRECISION=precision(operand),
        BLOCK_T=tile.block_t,
        BLOCK_R=tile.block_r,
        BLOCK_D=tile.block_d,
        BLOCK_SCAN=2048,
    )
    check(arch, operand, ptx, shared, tmp_path)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("winners", [torch.uint8, torch.int16])
def test_buckets(arch, winners, tmp_path):
    tile = maxsim_tiles.document_gradient_tiles(arch, "half", 128)
    sizes = {"BLOCK_T": tile.block_t, "BLOCK_SCAN": tile.block_scan}
    for kernel in (count_kernel, place_kernel):
        scan = compiled(kernel, arch, "bf16", {"num_warps": tile.scan_warps}, winners=winners, **sizes)
        check(arch, "bf16", *scan, tmp_path)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_helpers(arch, tmp_path):
    check(arch, "bf16", *compiled(row_query_kernel, arch, "bf16", {"num_warps": 1}, BLOCK=128), tmp_path)
    order = compiled(candidate_order_kernel, arch, "bf16", {"num_warps": 4}, BLOCK=8, BLOCK_SCAN=1024)
    check(arch, "bf16", *order, tmp_path)
    check(arch, "bf16", *compiled(live_tokens_kernel, arch, "bf16", {"num_warps": 2}, BLOCK=256), tmp_path)


def test_tiles_shrink_to_the_input():
    tiles = maxsim_tiles.forward_tiles(90, "half", 48, 33, False)
    assert (tiles.block_m, tiles.block_k, tiles.num_stages) == (64, 64, 2)
    tiles = maxsim_tiles.forward_tiles(90, "half", 48, 5, False)
    assert (tiles.block_m, tiles.block_k, tiles.num_warps, tiles.num_stages) == (32, 64, 1, 3)
    assert maxima_tiles(90, "half", 48, 5).block_m == 64
    assert maxsim_tiles.document_gradient_tiles(90, "half", 7).block_d == 16
    assert maxsim_tiles.query_gradient_tiles(90, "half", 1).block_d == 1
