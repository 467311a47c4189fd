"""Compiles kernels ahead of time, as their launches would, for GPUs that this machine does not have."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from triton import compiler
from triton.backends import nvidia
from triton.backends.compiler import GPUTarget

from pylate_fastmaxsim._winners import no_winner  # the constant of a launch that nothing else names
from pylate_fastmaxsim.kernels.runtime.arch import ARCHITECTURES, INPUT_PRECISION
from pylate_fastmaxsim.kernels.runtime.cached_launch import RELEASE, Launcher

CUOBJDUMP = Path(nvidia.__file__).with_name("bin") / "cuobjdump"
SHARED_MEMORY = {80: 163 * 1024, 86: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
MATRIX_UNIT = {80: "mma.sync", 86: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma", 120: "mma.sync"}
# Of vectors: 16-bit ones by their dtype, float32 by how it is multiplied.
ELEMENT = {"bf16": "*bf16", "fp16": "*fp16", "bf16x6": "*fp32", "bf16x3": "*fp32", "tf32": "*fp32"}
WINNERS = {torch.uint8: "*u8", torch.int16: "*i16"}
VECTORS = """qkv q_values d_values grad_q grad_d hidden weight embeddings grad
    grad_hidden q_states k_states v_states out grad_k grad_v"""
# The types of all other arguments, by their names.
NAMES = {
    "*u8": "q_keep d_keep keep zero_floor",
    "*i16": "groups",
    "*fp16": "centroids",
    "*i32": """codes byte_words buckets counts begins row_query live_tokens live_lengths rows q_rows d_rows bounds pending pool cu_seqlens
        key_cu_seqlens slot_rows group_texts""",
    "*i64": """seed q_starts q_lengths d_starts d_lengths candidates pairs pair_offsets starts lengths offsets q_offsets
        d_offsets keys""",
    "*fp32": """scores grad_scores weights maxima thresholds sums divisors log_sums inverse_norms squares cos sin bias scales shifts
        q_scales grad_weights grad_biases pooled constants slopes grad_parts values
        grad_values""",
    "fp32": "scale factor over_temperature",
    "i32": """num_queries num_documents num_slots num_tiles num_rows num_entries num_chunks num_pairs first_document
        documents_per_program row_blocks tiles_per_document programs_per_document first_row num_groups rows_per_part
        num_parts slot_blocks slots_per_part capacity k q_head k_head v_head grad_head num_keys reach
        blocks_per_document max_length num_texts""",
}
# Arguments of `forward_kernel` that documents of vectors, and poolings that keep winners, do without.
OF_COMPRESSED = ("q_scales", "scales", "codes", "centroids", "byte_words")
OF_SMOOTH = ("log_sums", "pooled", "scale")
TYPES = {name: kind for kind, names in NAMES.items() for name in names.split()}
SIZES = NAMES["i32"].split()


def points(cases: list[tuple], everywhere: tuple[tuple, ...]) -> Iterator:
    """Parameters ``(architecture, *case)``: sm_90 for each case, and all architectures for those of ``everywhere``.

    These are the smoke slice on sm_90.
    """
    for case in cases:
        for arch in ARCHITECTURES if case in everywhere else (90,):
            smoke = [pytest.mark.smoke] if arch == 90 and case in everywhere else []
            yield pytest.param(arch, *case, marks=smoke, id="-".join(["sm", *map(str, (arch, *case))]))


def kind(operand: str) -> str:
    """Key of the tile tables."""
    return "half" if operand in ("bf16", "fp16") else operand


def options_of(tile) -> dict[str, int | None]:
    """The options of Triton among the fields of tiles."""
    names = {"num_warps": "num_warps", "num_stages": "num_stages", "max_registers": "maxnreg"}
    return {names[name]: value for name, value in tile._asdict().items() if name in names}


def blocks_of(tile) -> dict[str, int]:
    """The constants of a kernel among the fields of tiles."""
    return {name.upper(): value for name, value in tile._asdict().items() if name.startswith(("block", "unroll"))}


def compiled(
    launcher: Launcher, arch: int, operand: str, options: dict, absent=(), winners=torch.uint8, types=(), **constants
) -> compiler.CompiledKernel:
    """A kernel, called as launches call it; ``absent`` pointers are None."""
    kernel = launcher.kernel
    known = TYPES | dict.fromkeys(["winners", "token_winners"], WINNERS[winners])
    types = known | dict.fromkeys(VECTORS.split(), ELEMENT[operand]) | dict(types)
    precision = INPUT_PRECISION["highest"] if kind(operand) == "half" else operand
    constants |= {"SENTINEL": no_winner(winners), "PRECISION": precision}
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    constants |= dict.fromkeys(set(absent) & set(kernel.arg_names))
    signature = {name: "constexpr" if name in constants else types[name] for name in kernel.arg_names}
    aligned = {
        (i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names) if signature[name].startswith("*")
    }
    source = compiler.ASTSource(kernel, signature, constants, aligned)
    return compiler.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def check(arch: int, operand: str, kernel: compiler.CompiledKernel, directory: Path, unit: bool = False) -> None:
    """It fits the GPU, spills nothing, and multiplies as precisely as asked; with ``unit`` on its matrix unit.

    Spills are looked at in the release of Triton that the tiles were chosen for. Others allot registers otherwise.
    """
    ptx = kernel.asm["ptx"]
    assert kernel.metadata.shared <= SHARED_MEMORY[arch]
    if operand != "tf32":
        assert "tf32" not in ptx, "only float32 at medium precision may be rounded to TF32"
    if unit and kind(operand) == "half":
        assert MATRIX_UNIT[arch] in ptx
    if RELEASE == (3, 6):
        (directory / "kernel.cubin").write_bytes(kernel.asm["cubin"])
        command = [CUOBJDUMP, "-res-usage", "kernel.cubin"]
        usage = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=True).stdout
        # Where registers do not suffice, numbers wait on the stack of a thread.
        assert re.findall(r"STACK:(\d+) .* LOCAL:(\d+)", usage) == [("0", "0")], usage
