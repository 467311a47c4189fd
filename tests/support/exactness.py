"""Compares MaxSim's kernels or CPU path with the float64 definition.

A path is a module with ``forward`` and ``backward``: ``maxsim_kernels`` or ``cpu.maxsim``. In a near tie another
token may win than in float64. So gradients are compared with those of the path's own winners, and winners by their
scores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from unittest import mock

import torch
from torch import Tensor

from pylate_fastmaxsim import TokenBatch, reference
from pylate_fastmaxsim._operands import ScoringOperands
from pylate_fastmaxsim._winners import no_winner

# Relative error of gradients (Frobenius norm) and of scores (against their root mean square).
TOLERANCE = {
    (torch.float32, "highest"): 1e-5,
    # Sums of two bf16: 16 bits.
    (torch.float32, "high"): 3e-5,
    (torch.float32, "medium"): 2e-3,
    (torch.bfloat16, "highest"): 2e-3,
    (torch.float16, "highest"): 2e-3,
}

# float64 values that a comparison holds at once: 256 MiB.
REFERENCE_ELEMENTS = 2**25


def run(
    path: ModuleType,
    queries: TokenBatch,
    documents: TokenBatch,
    candidates=None,
    zero_floor=None,
    precision: str = "highest",
    grad: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Scores, winners and both gradients of ``path``."""
    operands = ScoringOperands.of(queries, documents, candidates, zero_floor)
    with uninitialized_memory_as_nan():
        scores, winners = path.forward(operands, True, precision)
        grad = torch.ones_like(scores) if grad is None else grad
        return scores, winners, *path.backward(grad, winners, operands, precision, True, True)


@contextmanager
def uninitialized_memory_as_nan() -> Iterator[None]:
    """Unwritten memory shows: new memory holds NaN, or for integers 1, a possible winner."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()

    def filling(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def filled(*arguments, **keywords) -> Tensor:
            tensor = make(*arguments, **keywords)
            return tensor if tensor.is_floating_point() else tensor.fill_(1)

        return filled

    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with (
            mock.patch.object(torch, "empty", filling(torch.empty)),
            mock.patch.object(Tensor, "new_empty", filling(Tensor.new_empty)),
        ):
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def winner_index(winners: Tensor) -> Tensor:
    """Winners as int64, -1 where there is none."""
    index = winners.long()
    index[winners == no_winner(winners.dtype)] = -1
    return index


def row_queries(queries: TokenBatch) -> Tensor:
    """Which query each row of the values belongs to, -1 for none."""
    rows = torch.full((len(queries.values),), -1, device=queries.device)
    offset = torch.arange(queries.max_length, device=queries.device)
    inside = offset < queries.lengths[:, None]
    number = torch.arange(len(queries), device=queries.device)[:, None].expand_as(inside)
    rows[(queries.starts[:, None] + offset)[inside]] = number[inside]
    return rows


def from_winners(
    queries: TokenBatch, documents: TokenBatch, candidates: Tensor | None, winners: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Scores and gradients in float64 of the winners that a path chose."""
    q, d, grad = queries.values.double(), documents.values.double(), grad.double()
    query_of = row_queries(queries)
    scores, grad_q, grad_d = torch.zeros_like(grad), torch.zeros_like(q), torch.zeros_like(d)
    index = winner_index(winners)
    # A slot of one document has at most as many winners as there are query rows.
    step = max(1, REFERENCE_ELEMENTS // max(1, q.numel()))
    for first in range(0, len(index), step):
        slot, row = (index[first : first + step] >= 0).nonzero(as_tuple=True)
        slot = slot + first
        query = query_of[row]
        document = slot if candidates is None else candidates[query, slot]
        token = documents.starts[document] + index[slot, row]
        scores.index_put_((query, slot), (q[row] * d[token]).sum(dim=1), accumulate=True)
        weight = grad[query, slot][:, None]
        grad_q.index_add_(0, row, weight * d[token])
        grad_d.index_add_(0, token, weight * q[row])
    return scores, grad_q, grad_d


def exact_scores(queries: TokenBatch, documents: TokenBatch, candidates=None, zero_floor=None) -> Tensor:
    """Scores of the definition in float64, a part of the queries at a time."""
    q64 = queries.with_values(queries.values.double())
    d64 = documents.with_values(documents.values.double())
    if candidates is None:
        per_query = len(documents) * documents.max_length * queries.max_length
    else:
        per_query = candidates.shape[1] * documents.max_length * (queries.max_length + documents.dim)
    step = max(1, REFERENCE_ELEMENTS // max(1, per_query))
    parts = [torch.arange(i, min(i + step, len(q64)), device=queries.device) for i in range(0, len(q64), step)]
    if not parts:
        return reference.maxsim(q64, d64, candidates, zero_floor)
    return torch.cat(
        [
            reference.maxsim(q64.select(part), d64, None if candidates is None else candidates[part], zero_floor)
            for part in parts
        ]
    )


def relative_error(ours: Tensor, exact: Tensor, spread: Tensor | None = None) -> float:
    """Error relative to ``exact``, or to ``spread`` where that is larger, in the Frobenius norm."""
    scale = exact.norm() if spread is None else torch.maximum(exact.norm(), spread.norm())
    return ((ours.double() - exact).norm() / scale.clamp_min(1e-30)).item()


def _spread(queries: TokenBatch, documents: TokenBatch, candidates, winners: Tensor, grad: Tensor) -> list[Tensor]:
    """Root of the sum of squares of the terms of each score and gradient: the scale of rounding where terms cancel."""
    squared = [batch.with_values(batch.values.double().square()) for batch in (queries, documents)]
    return [total.sqrt() for total in from_winners(*squared, candidates, winners, grad.double().square())]


def check(
    path: ModuleType,
    queries: TokenBatch,
    documents: TokenBatch,
    candidates=None,
    zero_floor=None,
    precision: str = "highest",
    tolerance: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Scores and winners; AssertionError unless they and both gradients of ``path`` are those of the definition."""
    tolerance = tolerance or TOLERANCE[queries.values.dtype, precision]
    exact = exact_scores(queries, documents, candidates, zero_floor)
    generator = torch.Generator(queries.device).manual_seed(3)
    grad = torch.randn(exact.shape, device=queries.device, generator=generator)
    scores, winners, grad_q, grad_d = run(path, queries, documents, candidates, zero_floor, precision, grad)
    assert scores.dtype == torch.float32
    chosen, exact_q, exact_d = from_winners(queries, documents, candidates, winners, grad)
    spread, spread_q, spread_d = _spread(queries, documents, candidates, winners, grad)
    assert relative_error(scores, exact, spread) < tolerance, "scores"
    assert relative_error(chosen, exact, spread) < tolerance, "winners"
    for name, ours, wanted, scale in (("query", grad_q, exact_q, spread_q), ("document", grad_d, exact_d, spread_d)):
        assert ours.dtype == queries.values.dtype
        assert relative_error(ours, wanted, scale) < tolerance, f"{name} gradient"
        assert not ours[wanted.abs().sum(dim=1) == 0].any(), f"{name} gradient of a row without a winner"
    operands = ScoringOperands.of(queries, documents, candidates, zero_floor)
    alone = path.forward(operands, False, precision)[0]
    assert torch.equal(alone, scores), "scores without winners"
    return scores, winners
