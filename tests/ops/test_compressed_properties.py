"""Compressed documents on the CPU against the float64 definition, over formats and shapes drawn by hypothesis."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from pylate_fastmaxsim import CompressedBatch, TokenBatch, compress, maxsim, reference
from pylate_fastmaxsim.compressed import Residual, rounded_queries
from tests.support.ragged_batches import ragged
from tests.support.residual_codecs import random_codec

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
LENGTHS = (0, 1, 2, 3, 5, 8, 17, 40)

sweep = settings(deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@dataclass
class Problem:
    queries: TokenBatch
    documents: CompressedBatch
    candidates: Tensor | None


def without_scales(documents: CompressedBatch) -> CompressedBatch:
    """Residual codes as PLAID keeps them."""
    tokens = documents.tokens
    tokens = Residual(tokens.codes.long(), tokens.packed, None, tokens.codec)
    return CompressedBatch(tokens, documents.starts, documents.lengths, documents.max_length, documents.keep)


@st.composite
def problems(draw) -> Problem:
    """Any format, d of 1 to 40, lengths, masks, candidates and dtype of queries; some documents selected, some repeated."""
    format = draw(st.sampled_from(("int8", "int8 by token", "fp8", 1, 2, 4, "plaid")))
    bits = 4 if format == "plaid" else format
    step = 8 // bits if isinstance(bits, int) else 1
    dim = draw(st.integers(1, 40 // step)) * step
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    query_lengths, document_lengths = (draw(st.lists(st.sampled_from(LENGTHS), max_size=5)) for _ in range(2))
    queries = ragged(generator, query_lengths, dim, draw(st.sampled_from(DTYPES)), False, draw(st.booleans()))
    documents = ragged(generator, document_lengths, dim, draw(st.sampled_from(DTYPES)), False, draw(st.booleans()))
    sizes = torch.exp(2 * torch.randn(len(documents.values), 1, generator=generator))
    documents = documents.with_values(documents.values * sizes.to(documents.values.dtype))
    if isinstance(bits, int):
        documents = compress(documents, random_codec(dim, bits, seed=draw(st.integers(0, 99))))
        documents = without_scales(documents) if format == "plaid" else documents
    else:
        documents = compress(documents, format.split()[0], per_token=format == "int8 by token")
    if document_lengths and draw(st.booleans()):
        chosen = draw(st.lists(st.integers(0, len(document_lengths) - 1), max_size=6))
        documents = documents.select(torch.tensor(chosen, dtype=torch.int64))
    candidates = None
    if len(documents) and draw(st.booleans()):
        shape = (len(query_lengths), draw(st.integers(0, 4)))
        candidates = torch.randint(0, len(documents), shape, generator=generator)
    return Problem(queries, documents, candidates)


def scores_and_gradient(function, problem: Problem) -> tuple[Tensor, Tensor]:
    values = problem.queries.values.detach().clone().requires_grad_()
    scores = function(problem.queries.with_values(values), problem.documents, problem.candidates)
    weights = torch.randint(-2, 3, scores.shape, generator=torch.Generator().manual_seed(0))
    loss = (scores * weights.to(scores.dtype)).sum() + 0 * values.nan_to_num().sum()
    return scores.detach(), torch.autograd.grad(loss, values)[0]


def as_scored(problem: Problem) -> tuple[Tensor, Tensor]:
    """Vectors of queries and documents whose products are scored, ``[Tq, d]`` and ``[T, d]``, in float64."""
    values, documents = problem.queries.values, problem.documents
    if documents.format == "residual":
        return values.double(), documents.decompress(values.dtype).values.double()
    rounded, scales = rounded_queries(values, documents.format)
    return rounded.double() * scales.double()[:, None], documents.decompress(torch.float64).values


def smallest_margin(problem: Problem, q_values: Tensor, d_values: Tensor) -> float:
    """Least distance between the best and the second best similarity of any maximum, relative to the vectors' lengths."""
    unit_queries, q_mask = problem.queries.with_values(F.normalize(q_values)).to_padded()
    d_padded, d_mask = problem.documents.decompress(torch.float64).with_values(d_values).to_padded()
    if not (q_mask.any() and d_mask.any()):
        return torch.inf
    longest = d_padded.norm(dim=-1).amax(dim=1)[:, None, None]
    similarities = torch.einsum("qsh,dth->qsdt", unit_queries, d_padded / longest.where(longest > 0, 1))
    similarities = F.pad(similarities.masked_fill(~d_mask, -torch.inf), (0, 1), value=-torch.inf)
    best, second = similarities[q_mask].topk(2, dim=-1).values.unbind(dim=-1)
    return (best - second).nan_to_num(nan=torch.inf).min().item()


@given(problem=problems())
@settings(sweep, max_examples=150)
def test_scores_and_gradients_are_those_of_decompressed_documents(problem):
    dtype = problem.queries.values.dtype
    expected = scores_and_gradient(reference.compressed_maxsim, problem)
    actual = scores_and_gradient(maxsim, problem)
    assert actual[0].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    q_values, d_values = as_scored(problem)
    epsilon = 1e-14 if dtype == torch.float64 else 1e-6
    assert actual[0].shape == expected[0].shape
    if expected[0].numel() == 0:
        return
    d_norm, q_norms = d_values.norm(dim=1).nan_to_num().max(), q_values.norm(dim=1).nan_to_num().sum()
    assert ((actual[0] - expected[0]).abs() <= epsilon * q_norms * d_norm).all()
    # Products of whole numbers are exact, so that of int8 with scales of documents any tie is the same.
    exact = problem.documents.format == "int8" and not problem.documents.tokens.per_token
    if exact or smallest_margin(problem, q_values, d_values) > 1e-4:
        assert actual[1].dtype == dtype
        bound = torch.finfo(dtype).eps / 2 * expected[1].abs() + epsilon * expected[0].shape[1] * d_norm
        assert ((actual[1].double() - expected[1].double()).abs() <= bound).all()
