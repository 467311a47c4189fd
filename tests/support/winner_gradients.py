"""Compares the gradients of winners that are chosen at random with sums in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from pylate_fastmaxsim import TokenBatch
from pylate_fastmaxsim._operands import ScoringOperands
from pylate_fastmaxsim._winners import no_winner, winner_dtype
from pylate_fastmaxsim.kernels.winner_backward import launch
from tests.support.exactness import from_winners, relative_error, row_queries, uninitialized_memory_as_nan


def random_winners(
    generator: torch.Generator, queries: TokenBatch, documents: TokenBatch, candidates: Tensor | None, ranks: int
) -> Tensor:
    """Winners ``[P, ranks, Tq]``, different tokens of a document; a tenth of them, at any rank, is missing."""
    device, query = queries.device, row_queries(queries)
    if candidates is None:
        lengths = documents.lengths[:, None].expand(-1, len(query))
    else:
        lengths = documents.lengths[candidates].t()[:, query.clamp(min=0)]
    lengths = torch.where(query < 0, 0, lengths)
    slots, rows = lengths.shape
    dtype = winner_dtype(documents.max_length)
    winners = torch.full((slots, ranks, rows), no_winner(dtype), dtype=dtype, device=device)
    for slot in range(slots):
        order = torch.rand(documents.max_length, rows, generator=generator).to(device)
        order[torch.arange(documents.max_length, device=device)[:, None] >= lengths[slot]] = 2.0
        noise, token = (each[:ranks] for each in order.sort(dim=0))
        chosen = (noise <= 1.0) & (torch.rand(noise.shape, generator=generator).to(device) > 0.1)
        winners[slot, : len(token)] = torch.where(chosen, token, no_winner(dtype)).to(dtype)
    return winners


def check(
    generator: torch.Generator,
    queries: TokenBatch,
    documents: TokenBatch,
    candidates: Tensor | None = None,
    ranks: int = 1,
    tolerance: float = 1e-5,
    precision: str = "highest",
) -> None:
    """AssertionError unless both gradients are sums over all winners, the same bits alone, and zero where nothing won.

    The first query and the first document are NaN, and the gradient of every score that they take part in is 0.
    """
    winners = random_winners(generator, queries, documents, candidates, ranks)
    slots = len(documents) if candidates is None else candidates.shape[1]
    grad = torch.randn(len(queries), slots, generator=generator).to(queries.device)
    scored = torch.arange(slots, device=grad.device).expand_as(grad) if candidates is None else candidates
    grad[0], grad[scored == 0] = 0.0, 0.0
    for batch in (queries, documents):
        batch.values[batch.starts[0] : batch.starts[0] + batch.lengths[0]] = torch.nan
    operands = ScoringOperands.of(queries, documents, candidates, None)

    def run(need_q: bool, need_d: bool) -> tuple[Tensor, Tensor]:
        with uninitialized_memory_as_nan():
            return launch.backward(grad, winners, operands, precision, need_q, need_d)

    ours = run(True, True)
    assert torch.equal(ours[0], run(True, False)[0]) and torch.equal(ours[1], run(False, True)[1])
    used = [batch.with_values(batch.values.double().nan_to_num()) for batch in (queries, documents)]
    squared = [batch.with_values(batch.values.square()) for batch in used]
    exact, spread = [0, 0], [0, 0]
    for rank in winners.unbind(dim=1):
        for total, batches, weights in ((exact, used, grad), (spread, squared, grad.double().square())):
            for side, gradient in enumerate(from_winners(*batches, candidates, rank, weights)[1:]):
                total[side] = total[side] + gradient
    for name, gradient, wanted, scale in zip(("query", "document"), ours, exact, spread, strict=True):
        assert relative_error(gradient, wanted, scale.sqrt()) < tolerance, f"{name} gradient"
        assert not gradient[scale.sum(dim=1) == 0].any(), f"{name} gradient of a row without a winner"
