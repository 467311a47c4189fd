"""All kernels compile without a GPU, fit the GPUs of the tables, multiply on their matrix units, and spill nothing."""

from typing import NamedTuple

import pytest
import torch

pytest.importorskip("triton")

from pylate_fastmaxsim.kernels.attention import launch as attention  # noqa: E402
from pylate_fastmaxsim.kernels.attention.forward import attention_kernel, rotary_kernel  # noqa: E402
from pylate_fastmaxsim.kernels.attention.gradient import attention_gradient_kernel  # noqa: E402
from pylate_fastmaxsim.kernels.compressed import launch as of_compressed  # noqa: E402
from pylate_fastmaxsim.kernels.compressed.conversions import decompress_kernel, round_rows_kernel  # noqa: E402
from pylate_fastmaxsim.kernels.compressed.query_gradient import compressed_query_gradient_kernel  # noqa: E402
from pylate_fastmaxsim.kernels.layers import launch as layers  # noqa: E402
from pylate_fastmaxsim.kernels.layers.glu import glu_gradient_kernel, glu_kernel  # noqa: E402
from pylate_fastmaxsim.kernels.layers.norm import norm_gradient_kernel, sum_parts_kernel  # noqa: E402
from pylate_fastmaxsim.kernels.maxsim.forward import forward_kernel  # noqa: E402
from pylate_fastmaxsim.kernels.maxsim.plan import VECTORS as OF_VECTORS  # noqa: E402
from pylate_fastmaxsim.kernels.maxsim.tiles import forward_tiles  # noqa: E402
from pylate_fastmaxsim.kernels.pooled import launch as pooled  # noqa: E402
from pylate_fastmaxsim.kernels.pooled import smooth_gradients as smooth  # noqa: E402
from pylate_fastmaxsim.kernels.pooled.top_many_forward import top_many_kernel  # noqa: E402
from pylate_fastmaxsim.kernels.primitives.live_rows import live_rows_kernel, live_tokens_kernel  # noqa: E402
from pylate_fastmaxsim.kernels.projection import backward, forward  # noqa: E402
from pylate_fastmaxsim.kernels.projection import tiles as projection_tiles  # noqa: E402
from pylate_fastmaxsim.kernels.runtime.arch import ALL_REGISTERS, next_power_of_2  # noqa: E402
from pylate_fastmaxsim.kernels.splade.launch import maxima_tiles as splade_tiles  # noqa: E402
from pylate_fastmaxsim.kernels.splade.maxima import maxima_kernel, slots_kernel, values_kernel  # noqa: E402
from pylate_fastmaxsim.kernels.splade.slopes import slopes_kernel, vocabulary_gradient_kernel  # noqa: E402
from pylate_fastmaxsim.kernels.winner_backward import document_gradient, sorting  # noqa: E402
from pylate_fastmaxsim.kernels.winner_backward import tiles as winner_tiles  # noqa: E402
from pylate_fastmaxsim.kernels.winner_backward.launch import in_flight  # noqa: E402
from pylate_fastmaxsim.kernels.winner_backward.query_gradient import query_gradient_kernel  # noqa: E402
from pylate_fastmaxsim.kernels.xtr import kth_largest  # noqa: E402
from pylate_fastmaxsim.kernels.xtr.launch import collect_tiles, maxima_tiles  # noqa: E402
from pylate_fastmaxsim.kernels.xtr.scores import xtr_scores_kernel  # noqa: E402
from pylate_fastmaxsim.kernels.xtr.token_maxima import negative_maxima_kernel, token_maxima_kernel  # noqa: E402
from tests.support.compiled import (  # noqa: E402  # noqa: E402, I001
    MATRIX_UNIT,
    OF_COMPRESSED,
    OF_SMOOTH,
    SHARED_MEMORY,
    blocks_of,
    check,
    compiled,
    kind,
    options_of,
    points,
)

pytestmark = pytest.mark.compile
smoke = pytest.mark.smoke


def fits(directory, kernel, arch, operand, options, absent=(), unit=False, **constants) -> str:
    """PTX of a kernel that fits; ``options`` are tiles or those of Triton."""
    if hasattr(options, "_asdict"):
        options, constants = options_of(options), constants | blocks_of(options)
    made = compiled(kernel, arch, operand, options, absent, **constants)
    check(arch, operand, made, directory, unit)
    return made.asm["ptx"]


EVERYWHERE = (("bf16", 128), ("bf16x6", 128))
CASES = [*EVERYWHERE, ("bf16", 96), ("bf16", 256), ("bf16", 768), ("fp16", 128)]
CASES += [("bf16x6", 100), ("bf16x6", 768), ("bf16x3", 128), ("tf32", 128)]


class Batch(NamedTuple):
    """What the compiled forward depends on, besides the vectors."""

    rows: int = 4096
    long_queries: bool = False
    candidates: bool = False
    masks: bool = False
    winners: torch.dtype | None = torch.uint8


def compile_forward(arch, operand, dim, batch, directory):
    want_winners = batch.winners is not None
    query_rows = batch.rows if batch.long_queries else 32
    tile = forward_tiles(arch, kind(operand), dim, batch.rows, want_winners, query_rows)
    absent = (() if batch.candidates else ("candidates",)) + (() if want_winners else ("winners",))
    absent += (() if batch.masks else ("q_keep", "live_tokens", "zero_floor")) + OF_COMPRESSED + OF_SMOOTH
    constants = OF_VECTORS | {"POOLING": "max", "K": 1, "DIM": dim, "ROWS_PER_QUERY": 32, "WANT_WINNERS": want_winners}
    constants |= {"ONE_QUERY": batch.candidates or batch.long_queries, "winners": batch.winners or torch.uint8}
    fits(directory, forward_kernel, arch, operand, tile, absent, unit=batch == Batch(), **constants)


@pytest.mark.parametrize("arch, operand, dim", points(CASES, EVERYWHERE))
def test_maxsim(arch, operand, dim, tmp_path):
    compile_forward(arch, operand, dim, Batch(), tmp_path)


# Each pair of properties occurs once at least.
BATCHES = {
    "masked-training": Batch(masks=True),
    "scoring": Batch(masks=True, winners=None),
    "long-training": Batch(long_queries=True, masks=True, winners=torch.int16),
    "long-scoring": Batch(long_queries=True, winners=None),
    "candidates-training": Batch(32, candidates=True, masks=True),
    "candidates-scoring": Batch(32, candidates=True, winners=None),
}


@pytest.mark.parametrize("operand, dim", EVERYWHERE)
@pytest.mark.parametrize("name", BATCHES)
def test_maxsim_of_other_batches(operand, dim, name, tmp_path):
    compile_forward(90, operand, dim, BATCHES[name], tmp_path)


# ---- gradients of winners: element, size of a vector, winners of a row and document

RANKED_EVERYWHERE = (("bf16", 128, 1), ("bf16x6", 128, 4))
RANKED = [*RANKED_EVERYWHERE, *((operand, dim, 1) for operand, dim in CASES[1:]), ("bf16", 128, 4)]
RANKED += [("bf16", 768, 4), ("fp16", 128, 4), ("bf16", 128, 64)]


def registers(tile, ranks):
    return options_of(tile) | ({} if ranks == 1 else {"maxnreg": ALL_REGISTERS})


@pytest.mark.parametrize(
    "arch, operand, dim, ranks", points([*RANKED_EVERYWHERE, ("bf16", 768, 1), ("bf16", 128, 64)], RANKED_EVERYWHERE)
)
def test_query_gradient(arch, operand, dim, ranks, tmp_path):
    tile = winner_tiles.query_gradient_tiles(arch, kind(operand), dim)
    constants = {"DIM": dim, **blocks_of(tile), **in_flight(tile, ranks, warps=0)}
    # With all documents it writes the query of each row for the document gradient.
    for absent in (("candidates",), ("row_query",)) if arch == 90 else (("candidates",),):
        fits(tmp_path, query_gradient_kernel, arch, operand, registers(tile, ranks), absent, **constants)


@pytest.mark.parametrize("arch, operand, dim, ranks", points(RANKED, RANKED_EVERYWHERE))
def test_document_gradient(arch, operand, dim, ranks, tmp_path):
    tile = winner_tiles.document_gradient_tiles(arch, kind(operand), dim)
    constants = {"DIM": dim, "SETS": ranks > 1, "WRITE_ZEROS": False, "types": {"buckets": "*i64"} if ranks > 1 else {}}
    fits(tmp_path, document_gradient.document_gradient_kernel, arch, operand, tile, **constants)


def compile_candidates(arch, operand, dim, ranks, directory, absent=(), write_zeros=False):
    tile = winner_tiles.candidate_gradient_tiles(arch, kind(operand), dim)
    constants = {
        "DIM": dim,
        "RANKS": ranks,
        "SHORT_QUERIES": ranks == 1,
        "WRITE_ZEROS": write_zeros,
        "BLOCK_SCAN": 2048,
    }
    kernel, options = document_gradient.candidate_document_gradient_kernel, registers(tile, ranks)
    fits(directory, kernel, arch, operand, options, absent, **constants, **blocks_of(tile))


@pytest.mark.parametrize("arch, operand, dim, ranks", points(RANKED, RANKED_EVERYWHERE))
def test_candidate_document_gradient(arch, operand, dim, ranks, tmp_path):
    compile_candidates(arch, operand, dim, ranks, tmp_path)


@pytest.mark.parametrize("operand", ["bf16", "bf16x6"])
def test_candidate_document_gradient_that_looks_for_its_pairs(operand, tmp_path):
    compile_candidates(90, operand, 128, 1, tmp_path, ("pairs", "pair_offsets"), write_zeros=True)


@smoke
@pytest.mark.parametrize("arch, winners, ranks", [(90, torch.uint8, 1), (90, torch.int16, 1), (80, torch.uint8, 1), (90, torch.int16, 4), (80, torch.uint8, 7), (90, torch.int16, 64)])  # fmt: skip
def test_buckets_and_sets(arch, winners, ranks, tmp_path):
    tile, padded = winner_tiles.document_gradient_tiles(arch, "half", 128), next_power_of_2(ranks)
    scan = tile.rows_of_scan if ranks == 1 else min(1024, 2048 // padded)
    sizes = {"RANKS": ranks, "BLOCK_RANKS": padded, "BLOCK_T": tile.block_t, "BLOCK_SCAN": scan}
    types = {"buckets": "*i64"} if ranks > 1 else {}
    for kernel in (sorting.count_kernel, sorting.place_kernel):
        fits(tmp_path, kernel, arch, "bf16", {"num_warps": tile.scan_warps}, winners=winners, types=types, **sizes)


POOLED_EVERYWHERE = (("bf16", 128),)
POOLED = [*POOLED_EVERYWHERE, ("bf16", 768), ("fp16", 128), ("bf16x6", 128), ("bf16x3", 128), ("tf32", 128)]
PACKED = ("q_keep", "live_tokens", "candidates")
ALL_ROWS = (*PACKED, "q_rows", "q_offsets", "pairs", "pair_offsets")


def compile_pooled(arch, operand, dim, k, directory, absent=PACKED, pooling="softmax", one_query=False):
    tile = pooled.forward_tiles(arch, kind(operand), dim, 4096, k)
    constants = OF_VECTORS | {"DIM": dim, "ROWS_PER_QUERY": 32, "ONE_QUERY": one_query, "WANT_WINNERS": k > 0}
    constants |= {"K": k, "KEPT": k, "POOLING": "top k" if k else pooling, "winners": torch.int16}
    absent = (*absent, "zero_floor", *OF_COMPRESSED, *(OF_SMOOTH if k else ["winners"]))
    fits(directory, forward_kernel if k <= 4 else top_many_kernel, arch, operand, tile, absent, **constants)


@pytest.mark.parametrize("arch, operand, dim", points(POOLED, POOLED_EVERYWHERE))
@pytest.mark.parametrize("k", [0, 4], ids=["softmax", "top-4"])
def test_pooled(arch, operand, dim, k, tmp_path):
    compile_pooled(arch, operand, dim, k, tmp_path)


@pytest.mark.parametrize("arch, operand, dim", [(90, "bf16", 128), (90, "bf16x6", 128), (80, "bf16", 128)])
def test_pooled_by_more_than_four(arch, operand, dim, tmp_path):
    compile_pooled(arch, operand, dim, 16, tmp_path)


@pytest.mark.parametrize("k", [0, 4], ids=["log-sum-exp", "top-4"])
def test_pooled_with_masks_and_candidates(k, tmp_path):
    compile_pooled(90, "bf16", 128, k, tmp_path, absent=("pooled",), pooling="log-sum-exp", one_query=True)


@pytest.mark.parametrize("arch, operand, dim", points(POOLED, POOLED_EVERYWHERE))
@pytest.mark.parametrize("log_sum_exp", [False, True], ids=["softmax", "log-sum-exp"])
def test_smooth_gradients(arch, operand, dim, log_sum_exp, tmp_path):
    gradients = "fp16" if operand == "fp16" else kind(operand)
    absent = (*ALL_ROWS, "slopes") if log_sum_exp else ALL_ROWS
    for kernel, tile in (
        (smooth.smooth_query_gradient_kernel, pooled.query_gradient_tiles(arch, gradients, dim, not log_sum_exp)),
        (smooth.smooth_document_gradient_kernel, pooled.document_gradient_tiles(arch, gradients, dim, False)),
    ):
        fits(tmp_path, kernel, arch, operand, tile, absent, DIM=dim)


@pytest.mark.parametrize(
    "absent", [("candidates", "pairs", "pair_offsets"), ("q_rows", "q_offsets")], ids=["all", "own"]
)
def test_smooth_gradients_with_masks(absent, tmp_path):
    for kernel, tile in (
        (smooth.smooth_query_gradient_kernel, pooled.query_gradient_tiles(90, "half", 128, False)),
        (
            smooth.smooth_document_gradient_kernel,
            pooled.document_gradient_tiles(90, "half", 128, "pairs" not in absent),
        ),
    ):
        fits(tmp_path, kernel, 90, "bf16", tile, absent, DIM=128)


# ---- XTR: dtype, d and number of query rows

XTR_EVERYWHERE = (("bf16", 128, 4096), ("bf16x6", 128, 4096))
XTR = [*XTR_EVERYWHERE, ("bf16", 128, 32), ("bf16", 96, 4096), ("bf16", 768, 4096), ("fp16", 128, 4096)]
XTR += [("bf16x6", 768, 4096), ("bf16x3", 128, 4096), ("tf32", 128, 4096)]


@pytest.mark.parametrize("kernel", [token_maxima_kernel, negative_maxima_kernel], ids=["maxima", "negative"])
@pytest.mark.parametrize("arch, operand, dim, rows", points(XTR, XTR_EVERYWHERE))
def test_token_maxima(arch, operand, dim, rows, kernel, tmp_path):
    tile, unit = maxima_tiles(arch, kind(operand), dim, rows), kernel is token_maxima_kernel and rows == 4096
    fits(tmp_path, kernel, arch, operand, tile, unit=unit, DIM=dim, WANT_WINNERS=True)


@pytest.mark.parametrize("kernel", [kth_largest.collect_kernel, kth_largest.bisect_kernel], ids=["collect", "bisect"])
@pytest.mark.parametrize("arch, operand, dim, rows", points(XTR, XTR_EVERYWHERE))
def test_kth_largest(arch, operand, dim, rows, kernel, tmp_path):
    tile = collect_tiles(arch, kind(operand), dim, rows)
    options = options_of(tile) | ({"maxnreg": ALL_REGISTERS} if kernel is kth_largest.bisect_kernel else {})
    block_k = maxima_tiles(arch, kind(operand), dim, rows).block_k
    # On the same unit as the maxima, with which its similarities are compared bit by bit.
    fits(tmp_path, kernel, arch, operand, options, unit=True, DIM=dim, BLOCK_K=block_k, **blocks_of(tile))


@smoke
@pytest.mark.parametrize("winners, count_retrieved", [(torch.uint8, False), (torch.int16, True)])
def test_xtr_scores(winners, count_retrieved, tmp_path):
    sizes = {"WANT_WINNERS": True, "COUNT_RETRIEVED": count_retrieved, "BLOCK_S": 16, "BLOCK_R": 32}
    options = {"num_warps": 4, "maxnreg": ALL_REGISTERS}
    fits(tmp_path, xtr_scores_kernel, 90, "bf16", options, winners=winners, **sizes)


def test_xtr_without_what_may_be_absent(tmp_path):
    tile = maxima_tiles(90, "half", 128, 4096)
    sizes = {"DIM": 128, "BLOCK_S": 16, "BLOCK_R": 32, "BLOCK": 256, "WANT_WINNERS": False, "COUNT_RETRIEVED": False}
    absent = ("groups", "live_tokens", "q_keep", "candidates", "zero_floor")
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    for kernel in (token_maxima_kernel, negative_maxima_kernel, live_rows_kernel, xtr_scores_kernel):
        fits(tmp_path, kernel, 90, "bf16", options, absent, **sizes, **blocks_of(tile))


# ---- compressed documents: format, bits, d and number of query rows

STORED = {"int8": "*i8", "int8 by token": "*i8", "fp8": "*fp8e4nv", "residual": "*u8"}
COMPRESSED_EVERYWHERE = (("int8", 8, 128, 4096), ("residual", 4, 128, 64))
COMPRESSED = [*COMPRESSED_EVERYWHERE, ("int8", 8, 128, 32), ("int8", 8, 100, 4096), ("int8", 8, 256, 4096)]
COMPRESSED += [("int8", 8, 768, 4096), ("int8 by token", 8, 128, 4096), ("fp8", 8, 128, 4096), ("fp8", 8, 128, 32)]
COMPRESSED += [("fp8", 8, 768, 4096), ("residual", 2, 128, 32), ("residual", 1, 96, 32), ("residual", 4, 256, 32)]


def absent_of(format: str) -> tuple[str, ...]:
    if format == "residual":
        return ("q_scales",)
    return ("codes", "centroids", "byte_words") + (("scales",) if format == "fp8" else ())


def compile_compressed(arch, format, bits, dim, rows, directory, absent=(), want_winners=True):
    tile = of_compressed.forward_tiles(arch, format, dim, rows)
    types = {"d_values": STORED[format], "q_values": "*bf16" if format == "residual" else STORED[format]}
    constants = {"POOLING": "max", "K": 1, "WANT_WINNERS": want_winners, "ONE_QUERY": rows <= 32, "ROWS_PER_QUERY": 32}
    constants |= {"FORMAT": format.split()[0], "PER_TOKEN": "token" in format, "BITS": bits, "DIM": dim, "types": types}
    absent = ("zero_floor", *OF_SMOOTH, *absent_of(format), *absent)
    ptx = fits(directory, forward_kernel, arch, "bf16", tile, absent, **constants)
    assert MATRIX_UNIT[arch] in ptx or "mma" in ptx


@pytest.mark.parametrize("arch, format, bits, dim, rows", points(COMPRESSED, COMPRESSED_EVERYWHERE))
def test_compressed(arch, format, bits, dim, rows, tmp_path):
    absent = "candidates", "q_keep", "live_tokens", "winners"
    compile_compressed(arch, format, bits, dim, rows, tmp_path, absent, want_winners=False)


WITH_EVERYTHING = [("int8", 8, 4096), ("fp8", 8, 4096), ("int8 by token", 8, 32), ("residual", 4, 32)]


@pytest.mark.parametrize("format, bits, rows", WITH_EVERYTHING)
def test_compressed_with_everything(format, bits, rows, tmp_path):
    compile_compressed(90, format, bits, 128, rows, tmp_path, () if rows == 32 else ("candidates",))


@pytest.mark.parametrize("arch", [100, 120])
def test_e4m3_of_newer_gpus(arch, tmp_path):
    compile_compressed(arch, "fp8", 8, 128, 4096, tmp_path, ("candidates",))


@pytest.mark.parametrize("format, bits, dim", [("residual", 4, 128), ("residual", 1, 768), ("fp8", 8, 128)])
def test_decompression(format, bits, dim, tmp_path):
    block_k = 1024 if dim == 768 else dim
    types = {"stored": "*u8", "vectors": "*bf16", "kept": "*u8"}
    sizes = {"FORMAT": format, "BITS": bits, "DIM": dim, "BLOCK_N": 4 if block_k == 1024 else 32, "BLOCK_K": block_k}
    fits(tmp_path, decompress_kernel, 80, "bf16", {"num_warps": 4}, absent_of(format), types=types, **sizes)


@pytest.mark.parametrize("format, bits, dim", [("residual", 2, 128), ("int8", 8, 128), ("fp8", 8, 768)])
def test_compressed_query_gradient(format, bits, dim, tmp_path):
    sizes = {"FORMAT": format, "PER_TOKEN": True, "BITS": bits, "DIM": dim, "UNROLL": 4}
    sizes |= {"BLOCK_ROWS": of_compressed.gradient_rows(dim), "BLOCK_K": 1024 if dim == 768 else dim}
    types = {"stored": "*i8" if format == "int8" else "*u8"}
    kernel = compressed_query_gradient_kernel
    fits(tmp_path, kernel, 80, "bf16", {"num_warps": 4}, absent_of(format), types=types, **sizes)


@smoke
@pytest.mark.parametrize("arch, rounded", [(80, "*i8"), (90, "*i8"), (90, "*fp8e4nv")])
def test_rounding(arch, rounded, tmp_path):
    sizes = {"IS_INT8": rounded == "*i8", "DIM": 128, "BLOCK_ROWS": 32, "BLOCK_K": 128}
    types = {"values": "*bf16", "rounded": rounded}
    fits(tmp_path, round_rows_kernel, arch, "bf16", {"num_warps": 4}, types=types, **sizes)


PROJECTED_EVERYWHERE = (("bf16", 768, 128), ("bf16x6", 768, 128))
PROJECTED = [*PROJECTED_EVERYWHERE, ("bf16", 1024, 96), ("bf16", 4096, 1024), ("bf16", 100, 48), ("fp16", 768, 128)]
PROJECTED += [("bf16x6", 1024, 512), ("bf16x3", 768, 128), ("tf32", 768, 128)]
PROJECTIONS = {
    "project": forward.project_kernel,
    "hidden_gradient": backward.hidden_gradient_kernel,
    "weight_gradient": backward.weight_gradient_kernel,
}


def compile_projection(name, arch, operand, dim_in, dim_out, directory, absent=()):
    tile = getattr(projection_tiles, f"{name}_tiles")(arch, kind(operand), dim_in, dim_out)
    absent = (*absent, "squares") if dim_out <= tile.block_d else absent
    sizes = {"IN": dim_in, "OUT": dim_out, "NORMALIZE": True}
    fits(directory, PROJECTIONS[name], arch, operand, tile, absent, unit=dim_in == 768, **sizes)


@pytest.mark.parametrize("name", PROJECTIONS)
@pytest.mark.parametrize("arch, operand, dim_in, dim_out", points(PROJECTED, PROJECTED_EVERYWHERE))
def test_projection(name, arch, operand, dim_in, dim_out, tmp_path):
    compile_projection(name, arch, operand, dim_in, dim_out, tmp_path)


@pytest.mark.parametrize("name", ["project", "weight_gradient"])
def test_projection_without_a_bias(name, tmp_path):
    compile_projection(name, 90, "bf16", 768, 128, tmp_path, absent=("bias", "grad_biases"))


SPLADE_EVERYWHERE = (("bf16", 768), ("bf16x6", 768))
SPLADE = [*SPLADE_EVERYWHERE, ("bf16", 384), ("fp16", 100), ("bf16", 32), ("bf16x3", 768), ("tf32", 768)]


def compile_maxima(arch, operand, dim, directory, absent=(), rectified=True):
    tile = splade_tiles(arch, kind(operand), dim)
    sizes = {"DIM": dim, "RECTIFIED": rectified, "GROUP": 8, "TILES_TOGETHER": tile.tiles_together}
    fits(directory, maxima_kernel, arch, operand, tile, absent, unit=True, **sizes)


@pytest.mark.parametrize("arch, operand, dim", points(SPLADE, SPLADE_EVERYWHERE))
def test_splade(arch, operand, dim, tmp_path):
    compile_maxima(arch, operand, dim, tmp_path)


def test_splade_maxima_that_may_be_negative(tmp_path):
    compile_maxima(90, "bf16", 768, tmp_path, ("bias",), rectified=False)


@smoke
@pytest.mark.parametrize("logs", [0, 2])
def test_splade_values(logs, tmp_path):
    for absent, winners in (((), torch.int16), (("winners",), torch.uint8)):
        sizes = {"RECTIFIED": logs > 0, "LOGS": logs, "BLOCK": 1024, "winners": winners}
        fits(tmp_path, values_kernel, 80, "bf16", {"num_warps": 4}, absent, **sizes)


@pytest.mark.parametrize("operand, dim", [("bf16", 768), ("bf16x6", 768), ("fp16", 2560)])
def test_splade_gradients(operand, dim, tmp_path):
    fits(tmp_path, slopes_kernel, 80, operand, {"num_warps": 4}, LOGS=1, BLOCK_N=32, BLOCK_M=64)
    types = {"grad_weight": "*bf16", "grad_bias": "*fp32"}
    sizes = {"DIM": dim, "BLOCK_N": 4, "BLOCK_D": 1024, "types": types}
    fits(tmp_path, vocabulary_gradient_kernel, 80, operand, {"num_warps": 1}, **sizes)


# ---- attention and encoder layers

ATTENTION = {
    "forward": (attention_kernel, attention.FORWARD),
    "backward": (attention_gradient_kernel, attention.BACKWARD),
}


@pytest.mark.parametrize(
    "dim, operand, window, dropout",
    [
        pytest.param(64, "bf16", True, 0.0, marks=smoke),
        (64, "fp16", False, 0.1),
        (32, "fp16", False, 0.1),
        (96, "bf16", True, 0.0),
        (128, "fp16", False, 0.1),
    ],
)
@pytest.mark.parametrize("kernel, table", ATTENTION.values(), ids=ATTENTION)
def test_attention(kernel, table, dim, operand, window, dropout):
    columns = max(dim, 128 if dim == 96 else 0)
    heads = 768 // dim
    # Rotary positions turn gradients, of one product, back.
    rotary = table is attention.BACKWARD and operand == "bf16" and dim == columns
    rows = [3 * heads * dim] * 3 if rotary else [dim, dim, heads * dim]
    layout = dict(zip(("Q_ROW", "K_ROW", "V_ROW"), rows, strict=True)) | {"GRAD_ROW": heads * dim, "HEADS": heads}
    layout |= {"DIM": dim, "COLUMNS": columns, "SCALE": 0.125, "HAS_WINDOW": window, "DROPOUT": dropout}
    absent = (() if rotary else ("cos", "sin")) + (() if dropout else ("seed",))
    tiles = table[columns]
    for tile in (*tiles.short, tiles.long):
        constants = layout | {"LONGER_THAN": 0, "BLOCK": tile.block, "LONG": tile is tiles.long}
        made = compiled(kernel, 90, operand, options_of(tile), absent, **constants)
        # Some spill a few registers, and were faster than those that spill none.
        assert made.metadata.shared <= SHARED_MEMORY[90]
        assert ("wgmma.mma_async" in made.asm["ptx"]) == (tile.block >= 64)


def test_log_sums_are_there_where_the_backward_reads_them():
    for columns, tiles in attention.FORWARD.items():
        longest_without = max(tile.block for tile in tiles.short)
        assert max(tile.block for tile in attention.BACKWARD[columns].short) >= longest_without


def of_types(kind: str, names: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), kind)


GLU = {"F": 1152, "BLOCK": layers.GLU_BLOCK}
TURNING = {"HEADS": 12, "DIM": 64, "BLOCK": attention.TURNED}
NORM = of_types("*fp32", "total mean rstd grad_total grad_x weight weight_parts") | of_types(
    "*bf16", "grad grad_branch"
)


@pytest.mark.parametrize(
    "kernel, options, absent, types, constants",
    [
        pytest.param(glu_kernel, {"num_warps": 4}, (), of_types("*bf16", "x hidden"), GLU, marks=smoke),
        (glu_gradient_kernel, {"num_warps": 4}, (), of_types("*fp16", "x hidden grad_hidden grad_x"), GLU),
        (rotary_kernel, {"num_warps": 4}, (), {}, TURNING),
        *(
            (norm_gradient_kernel, {"num_warps": layers.norm_warps(dim)}, ("bias_parts",), NORM, {"DIM": dim, "BLOCK": layers.next_power_of_2(dim)})
            for dim in (384, 768, 1024, 4096)
        ),
    ],
)  # fmt: skip
def test_layers_read_and_write_16_bytes_at_a_time(kernel, options, absent, types, constants, tmp_path):
    ptx = fits(
        tmp_path, kernel, 90, "fp16" if "*fp16" in types.values() else "bf16", options, absent, types=types, **constants
    )
    assert "ld.global.v4" in ptx and "st.global.v4" in ptx


HELPERS = [
    (live_tokens_kernel, 2, {"BLOCK": 256}),
    (live_rows_kernel, 2, {"BLOCK": 256}),
    (kth_largest.bound_kernel, 4, {"BLOCK": 4096}),
    (kth_largest.select_kernel, 4, {"BLOCK": 2048}),
    (sorting.row_query_kernel, 1, {"BLOCK": 128}),
    (sorting.candidate_order_kernel, 4, {"BLOCK": 8, "BLOCK_SCAN": 1024}),
    (smooth.coefficients_kernel, 4, {"BLOCK_S": 16, "BLOCK_R": 32}),
    (slots_kernel, 2, {"GROUP": 8, "BLOCK": 256}),
    (sum_parts_kernel, 8, {"DIM": 768, "ROWS": layers.SUM_ROWS, "BLOCK": layers.SUM_BLOCK, "types": of_types("*fp32", "parts sums")}),
    (forward.normalize_kernel, 4, {"OUT": 1024, "COLUMN_BLOCKS": 4, "BLOCK_T": 16, "BLOCK_D": 128}),
]  # fmt: skip


@smoke
@pytest.mark.parametrize("kernel, warps, sizes", HELPERS, ids=[row[0].kernel.fn.__name__ for row in HELPERS])
def test_helpers(kernel, warps, sizes, tmp_path):
    fits(tmp_path, kernel, 90, "bf16", {"num_warps": warps}, **sizes)
    if kernel is slots_kernel:
        fits(tmp_path, kernel, 90, "bf16", {"num_warps": warps}, ("live_tokens",), **sizes)
    if kernel is forward.normalize_kernel:
        fits(tmp_path, kernel, 90, "bf16x6", {"num_warps": warps}, **sizes)
