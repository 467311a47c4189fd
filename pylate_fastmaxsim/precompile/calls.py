"""Run the kernels of a call, on vectors of which only the number and the declared sizes matter.

As a program it is a process of a warm-up: it compiles the share of the calls that it reads from standard input.
"""

import pickle
import sys
from collections.abc import Iterator

import torch
from torch import Tensor

from pylate_fastmaxsim.codec import ResidualCodec
from pylate_fastmaxsim.compressed import CompressedBatch, Fp8, Int8, Residual
from pylate_fastmaxsim.ops.maxsim import maxsim
from pylate_fastmaxsim.ops.pooled import pooled_scores
from pylate_fastmaxsim.ops.projection import project_normalize
from pylate_fastmaxsim.ops.splade import splade_pool
from pylate_fastmaxsim.ops.xtr import xtr_scores
from pylate_fastmaxsim.precompile.shapes import FORMATS, Call
from pylate_fastmaxsim.tokens import TokenBatch


def run(call: Call, device: torch.device) -> None:
    """Make a batch of the sizes of a call, score, project or pool it, and go back through that if gradients are wanted."""
    if call.score == "splade":
        results = _splade_pooled(call, device)
    else:
        results = [_projected(call, device) if call.score == "project" else _scores(call, device)]
    for result in results:
        if call.gradients is not None:
            result.sum().backward()


def _scores(call: Call, device: torch.device) -> Tensor:
    shape = call.shape
    queries = _batch(call, shape.queries, call.query_rows, shape.query_tokens, call.queries_masked, device)
    documents = _batch(call, shape.documents, shape.documents, shape.document_tokens, call.documents_masked, device)
    queries.values.requires_grad_(call.gradients in ("queries", "both"))
    documents.values.requires_grad_(call.gradients in ("documents", "both"))
    candidates = None
    if shape.candidates is not None:
        order = torch.arange(shape.queries * shape.candidates, device=device)
        candidates = (order % shape.documents).view(shape.queries, shape.candidates)
    floor = {}
    if shape.zero_floor:
        floor["zero_floor"] = torch.zeros(shape.documents, dtype=torch.bool, device=device)
    if call.score in FORMATS:
        return maxsim(queries, _compressed(documents, call), candidates)
    if call.score == "saved":
        return maxsim(queries, documents, candidates, save_documents=shape.save_documents, **floor)
    if call.score == "xtr" and call.option:
        return xtr_scores(queries, documents, shape.xtr, candidates, normalizer="retrieved")
    if call.score == "xtr":
        return xtr_scores(queries, documents, shape.xtr, candidates, **floor)
    return pooled_scores(queries, documents, candidates, pooling=call.score, **floor)


def _batch(call: Call, count: int, rows: int, longest: int, masked: bool, device: torch.device) -> TokenBatch:
    """Texts of few tokens, said to have up to ``longest``: plans look at that, and only the kernels at the tokens."""
    values = torch.zeros(rows, call.shape.dim, dtype=call.shape.dtype, device=device)
    keep = torch.ones(rows, dtype=torch.bool, device=device) if masked else None
    borders = torch.arange(count + 1, device=device) * rows // count
    return TokenBatch(values, borders[:-1], borders.diff(), longest, keep, call.gapless)


def _compressed(documents: TokenBatch, call: Call) -> CompressedBatch:
    bits, dim, device = FORMATS[call.score], call.shape.dim, documents.device
    count = len(documents)
    stored = torch.zeros(count, dim * bits // 8, dtype=torch.uint8, device=device)
    scales = torch.ones(count, device=device)
    if call.score == "fp8":
        tokens = Fp8(stored.view(torch.float8_e4m3fn), 2.0**-8)
    elif call.score.startswith("int8"):
        tokens = Int8(stored.view(torch.int8), scales, per_token=call.score == "int8-per-token")
    else:
        buckets = torch.zeros(2**bits, device=device)
        codec = ResidualCodec(torch.zeros(1, dim, device=device).half(), buckets.half(), buckets[1:])
        codes = torch.zeros(count, dtype=torch.int32, device=device)
        tokens = Residual(codes, stored, None if call.option else scales, codec)
    return CompressedBatch(
        tokens, documents.starts, documents.lengths, documents.max_length, documents.keep, call.gapless
    )


def _projected(call: Call, device: torch.device) -> Tensor:
    shape = call.shape
    options = {"dtype": shape.dtype, "device": device, "requires_grad": call.gradients is not None}
    hidden = torch.zeros(shape.documents, shape.hidden, **options)
    weight = torch.zeros(shape.dim, shape.hidden, **options)
    bias = torch.zeros(shape.dim, **options) if call.option else None
    return project_normalize(hidden, weight, bias)


def _splade_pooled(call: Call, device: torch.device) -> Iterator[Tensor]:
    """Values of both activation functions, without a bias and with one of each dtype that occurs."""
    shape = call.shape
    texts = _batch(call, 1, 1, shape.document_tokens, call.documents_masked, device)
    options = {"device": device, "requires_grad": call.gradients is not None}
    texts.values.requires_grad_(call.gradients is not None)
    weight = torch.zeros(1, shape.dim, dtype=shape.dtype, **options)
    for dtype in (None, *dict.fromkeys((torch.float32, shape.dtype))):
        bias = None if dtype is None else torch.zeros(1, dtype=dtype, **options)
        for activation_function in ("relu", "log1p_relu"):
            yield splade_pool(texts, weight, bias, activation_function=activation_function)


def main() -> None:
    calls, index, float32_precision = pickle.load(sys.stdin.buffer)
    torch.cuda.set_device(index)
    torch.set_float32_matmul_precision(float32_precision)
    for call in calls:
        try:
            run(call, torch.device("cuda", index))
            torch.cuda.synchronize()
        except Exception as error:
            said = f"{type(error).__name__}: {error}".partition("\n")[0]
            raise SystemExit(f"{call}: {said}") from error


if __name__ == "__main__":
    main()
