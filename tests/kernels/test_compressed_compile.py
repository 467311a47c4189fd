"""The kernels of compressed documents compile without a GPU, fit the GPUs of the tables, and spill nothing."""

import pytest

pytest.importorskip("triton")

from pylate_fastmaxsim.kernels.compressed.conversions import decompress_kernel, round_rows_kernel  # noqa: E402
from pylate_fastmaxsim.kernels.compressed.launch import forward_tiles, gradient_rows  # noqa: E402
from pylate_fastmaxsim.kernels.compressed.query_gradient import compressed_query_gradient_kernel  # noqa: E402
from pylate_fastmaxsim.kernels.maxsim.forward import forward_kernel  # noqa: E402
from tests.support.compiled import MATRIX_UNIT, OF_SMOOTH, blocks_of, check, compiled, options_of, points  # noqa: E402

pytestmark = pytest.mark.compile

STORED = {"int8": "*i8", "int8 by token": "*i8", "fp8": "*fp8e4nv", "residual": "*u8"}
EVERYWHERE = (("int8", 8, 128, 4096), ("residual", 4, 128, 64))
CASES = [*EVERYWHERE, ("int8", 8, 128, 32), ("int8", 8, 100, 4096), ("int8", 8, 256, 4096), ("int8", 8, 768, 4096)]
CASES += [("int8 by token", 8, 128, 4096), ("fp8", 8, 128, 4096), ("fp8", 8, 128, 32), ("fp8", 8, 768, 4096)]
CASES += [("residual", 2, 128, 32), ("residual", 1, 96, 32), ("residual", 4, 256, 32)]


def absent_of(format: str) -> tuple[str, ...]:
    if format == "residual":
        return ("q_scales",)
    return ("codes", "centroids", "byte_words") + (("scales",) if format == "fp8" else ())


def compile_forward(arch, format, bits, dim, rows, directory, absent=(), **constants):
    tile = forward_tiles(arch, format, dim, rows)
    types = {"d_values": STORED[format], "q_values": "*bf16" if format == "residual" else STORED[format]}
    constants = {
        "POOLING": "max",
        "K": 1,
        "WANT_WINNERS": True,
        "ONE_QUERY": rows <= 32,
        "ROWS_PER_QUERY": 32,
    } | constants
    ptx, shared = compiled(
        forward_kernel, arch, "bf16", options_of(tile), ("zero_floor", *OF_SMOOTH, *absent_of(format), *absent), types=types,
        FORMAT=format.split()[0], PER_TOKEN="token" in format, BITS=bits, DIM=dim, **constants, **blocks_of(tile),
    )  # fmt: skip
    check(arch, "bf16", ptx, shared, directory)
    assert MATRIX_UNIT[arch] in ptx or "mma" in ptx


@pytest.mark.parametrize("arch, format, bits, dim, rows", points(CASES, EVERYWHERE))
def test_forward(arch, format, bits, dim, rows, tmp_path):
    compile_forward(
        arch, format, bits, dim, rows, tmp_path, ("candidates", "q_keep", "live_tokens", "winners"), WANT_WINNERS=False
    )


@pytest.mark.parametrize(
    "format, bits, rows", [("int8", 8, 4096), ("fp8", 8, 4096), ("int8 by token", 8, 32), ("residual", 4, 32)]
)
def test_forward_with_everything(format, bits, rows, tmp_path):
    compile_forward(90, format, bits, 128, rows, tmp_path, () if rows == 32 else ("candidates",))


@pytest.mark.parametrize("arch", [100, 120])
def test_e4m3_of_newer_gpus(arch, tmp_path):
    compile_forward(arch, "fp8", 8, 128, 4096, tmp_path, ("candidates",))


@pytest.mark.parametrize("format, bits, dim", [("residual", 4, 128), ("residual", 1, 768), ("fp8", 8, 128)])
def test_decompression(format, bits, dim, tmp_path):
    block_k = 1024 if dim == 768 else dim
    stored = {"stored": "*u8", "vectors": "*bf16", "kept": "*u8"}
    kernel = compiled(
        decompress_kernel, 80, "bf16", {"num_warps": 4}, absent_of(format), types=stored,
        FORMAT=format, BITS=bits, DIM=dim, BLOCK_N=4096 // block_k if block_k == 1024 else 32, BLOCK_K=block_k,
    )  # fmt: skip
    check(80, "bf16", *kernel, tmp_path)


@pytest.mark.parametrize("format, bits, dim", [("residual", 2, 128), ("int8", 8, 128), ("fp8", 8, 768)])
def test_query_gradient(format, bits, dim, tmp_path):
    stored = {"stored": "*i8" if format == "int8" else "*u8"}
    kernel = compiled(
        compressed_query_gradient_kernel, 80, "bf16", {"num_warps": 4}, absent_of(format), types=stored,
        FORMAT=format, PER_TOKEN=True, BITS=bits, DIM=dim, BLOCK_ROWS=gradient_rows(dim),
        BLOCK_K=1024 if dim == 768 else dim, UNROLL=4,
    )  # fmt: skip
    check(80, "bf16", *kernel, tmp_path)


@pytest.mark.smoke
@pytest.mark.parametrize("arch, rounded", [(80, "*i8"), (90, "*i8"), (90, "*fp8e4nv")])
def test_rounding(arch, rounded, tmp_path):
    types = {"values": "*bf16", "rounded": rounded}
    kernel = compiled(
        round_rows_kernel, arch, "bf16", {"num_warps": 4}, types=types,
        IS_INT8=rounded == "*i8", DIM=128, BLOCK_ROWS=32, BLOCK_K=128,
    )  # fmt: skip
    check(arch, "bf16", *kernel, tmp_path)
