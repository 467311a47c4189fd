"""Compares the kernels of compressed documents with the float64 definition.

As :mod:`exactness` does: gradients with those of the kernels' own winners, and winners by their scores.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pylate_fastmaxsim import CompressedBatch, TokenBatch, compress
from pylate_fastmaxsim.compressed import Residual, rounded_queries
from pylate_fastmaxsim.kernels.compressed import launch
from pylate_fastmaxsim.ops.compressed import _prepared
from tests.support.exactness import exact_scores, from_winners, relative_error, uninitialized_memory_as_nan
from tests.support.residual_codecs import random_codec

FORMATS = ("int8", "int8 by token", "fp8", "residual 4", "residual 2", "residual 1", "plaid")
# Relative errors, as in exactness. GPUs sum products of e4m3 with fewer bits than float32 has.
TOLERANCE = {"int8": 1e-6, "fp8": 2e-4, "residual": 1e-3}


def compressed_as(batch: TokenBatch, format: str) -> CompressedBatch:
    """A batch in one of FORMATS; "plaid" is of 4 bits and without norms."""
    if format.startswith(("residual", "plaid")):
        bits = int(format.split()[1]) if " " in format else 4
        documents = compress(batch, random_codec(batch.dim, bits).to(batch.device))
        if format != "plaid":
            return documents
        tokens = documents.tokens
        tokens = Residual(tokens.codes.long(), tokens.packed, None, tokens.codec)
        return CompressedBatch(tokens, documents.starts, documents.lengths, documents.max_length, documents.keep)
    return compress(batch, format.split()[0], per_token="token" in format)


def check(
    queries: TokenBatch, documents: CompressedBatch, candidates: Tensor | None = None, tolerance=None
) -> tuple[Tensor, Tensor]:
    """Scores and winners; AssertionError unless they and the gradient are those of the definition."""
    tolerance = tolerance or TOLERANCE[documents.format]
    operands = _prepared(queries, documents, candidates)
    with uninitialized_memory_as_nan():
        scores, winners = launch.forward(operands, True, "highest")
        generator = torch.Generator(queries.device).manual_seed(3)
        grad = torch.randn(scores.shape, device=queries.device, generator=generator)
        grad_q = launch.backward(grad, winners, operands)
        alone, _ = launch.forward(operands, False, "highest")
    assert torch.equal(alone, scores), "scores without winners"
    scored = documents.decompress(queries.values.dtype if documents.format == "residual" else torch.float64)
    scored = scored.with_values(scored.values.double())
    rounded = queries.with_values(queries.values.double())
    if documents.format != "residual":
        values, scales = rounded_queries(queries.values, documents.format)
        rounded = queries.with_values(values.double() * scales.double()[:, None])
    exact = exact_scores(rounded, scored, candidates)
    chosen, exact_q, _ = from_winners(rounded, scored, candidates, winners, grad)
    squared = [batch.with_values(batch.values.square()) for batch in (rounded, scored)]
    spread, spread_q, _ = (
        total.sqrt() for total in from_winners(*squared, candidates, winners, grad.double().square())
    )
    assert scores.dtype == torch.float32 and grad_q.dtype == queries.values.dtype
    assert relative_error(scores, exact, spread) < tolerance, "scores"
    assert relative_error(chosen, exact, spread) < tolerance, "winners"
    of_dtype = torch.finfo(grad_q.dtype).eps
    # By token, queries multiply in the order of the sum.
    assert relative_error(grad_q, exact_q, spread_q) < max(1e-5, of_dtype), "query gradient"
    assert not grad_q[exact_q.abs().sum(dim=1) == 0].any(), "query gradient of a row without a winner"
    return scores, winners
