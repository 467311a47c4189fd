"""Compares the pooling kernels with the float64 definition, scores and gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from pylate_fastmaxsim import TokenBatch, reference
from pylate_fastmaxsim._operands import ScoringOperands
from pylate_fastmaxsim.kernels.pooled import launch
from pylate_fastmaxsim.ops.pooled import gradient_of_each_winner, numbers_of
from pylate_fastmaxsim.pooling import Pooling
from tests.support.defined_winners import top_k_winners
from tests.support.exactness import from_winners, relative_error, uninitialized_memory_as_nan, winner_index

# Relative error (Frobenius norm). Weights of 16-bit rows are rounded to bf16, as the gradients are.
TOLERANCE = {
    (torch.float32, "highest"): 2e-5,
    (torch.float32, "high"): 1e-4,
    (torch.float32, "medium"): 5e-3,
    (torch.bfloat16, "highest"): 5e-3,
    (torch.float16, "highest"): 2e-3,
}


def run(queries, documents, candidates, pooling, grad, precision="highest") -> tuple[Tensor, ...]:
    """Scores, state and both gradients of the kernels."""
    operands, numbers = ScoringOperands.of(queries, documents, candidates), numbers_of(pooling)
    with uninitialized_memory_as_nan():
        scores, state = launch.forward(operands, numbers, True, precision)
        weights = gradient_of_each_winner(grad, operands, numbers.k) if numbers.k else grad
        gradients = launch.backward(weights, state, operands, numbers, precision, True, True)
    return scores, state, *gradients


def check(
    queries: TokenBatch,
    documents: TokenBatch,
    candidates: Tensor | None = None,
    *,
    pooling: Pooling,
    precision: str = "highest",
    ties: bool = False,
    slack: float = 1.0,
) -> None:
    """AssertionError unless scores and gradients are those of the definition, and so are scores without a state.

    Winners of k are compared where ``ties`` says that similarities are exact. Else a near tie may be settled otherwise,
    and gradients are compared with those of the winners that the kernels chose, whose scores must be right.
    """
    tolerance = slack * TOLERANCE[queries.values.dtype, precision]
    leaves = [batch.values.double().nan_to_num().requires_grad_() for batch in (queries, documents)]
    doubles = [batch.with_values(values) for batch, values in zip((queries, documents), leaves, strict=True)]
    exact = reference.pooled_scores(*doubles, candidates, pooling=pooling)
    generator = torch.Generator(exact.device).manual_seed(3)
    grad = torch.randn(exact.shape, generator=generator, device=exact.device)
    scores, state, *gradients = run(queries, documents, candidates, pooling, grad, precision)
    assert scores.dtype == torch.float32
    assert relative_error(scores, exact.detach()) < tolerance, "scores"
    operands, numbers = ScoringOperands.of(queries, documents, candidates), numbers_of(pooling)
    alone, none = launch.forward(operands, numbers, False, precision)
    assert none is None
    assert torch.equal(alone, scores), "scores without a state"
    if ties:
        plain = [batch.with_values(batch.values.detach()) for batch in doubles]
        assert torch.equal(winner_index(state), top_k_winners(*plain, numbers.k, candidates)), "winners"
    if numbers.k:
        weights = gradient_of_each_winner(grad, operands, numbers.k)
        ranks = [from_winners(queries, documents, candidates, rank, weights) for rank in state.unbind(dim=1)]
        chosen, *exact_gradients = map(sum, zip(*ranks, strict=True))
        assert relative_error(gradient_of_each_winner(chosen, operands, numbers.k), exact.detach()) < tolerance, (
            "winners"
        )
    else:
        exact_gradients = torch.autograd.grad(exact, leaves, grad.double())
    for name, ours, wanted in zip(("query", "document"), gradients, exact_gradients, strict=True):
        assert ours.dtype == queries.values.dtype
        assert relative_error(ours, wanted) < tolerance, f"{name} gradient"
        assert not ours[wanted.abs().sum(dim=1) == 0].any(), f"{name} gradient of a row that nothing uses"
