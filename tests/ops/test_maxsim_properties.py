"""The operator on the CPU against the float64 definition, over shapes drawn by hypothesis."""

from unittest import mock

import torch
from hypothesis import HealthCheck, given, settings

from pylate_fastmaxsim import maxsim, reference
from pylate_fastmaxsim._operands import ScoringOperands
from pylate_fastmaxsim._winners import winner_dtype
from pylate_fastmaxsim.cpu import maxsim as blocked
from tests.support.defined_winners import maxsim_winners
from tests.support.exactness import winner_index
from tests.support.strategies import Problem, problems

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

sweep = settings(deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


def scores_and_gradients(function, problem: Problem, dtype: torch.dtype):
    q_values, d_values = problem.values(dtype)
    scores = function(
        problem.queries.with_values(q_values),
        problem.documents.with_values(d_values),
        problem.candidates,
        zero_floor=problem.zero_floor,
    )
    weights = torch.randint(-2, 3, scores.shape, generator=torch.Generator().manual_seed(0))
    # The sums keep the graph connected where nothing is live.
    loss = (scores * weights.to(scores.dtype)).sum() + 0 * (q_values.nan_to_num().sum() + d_values.nan_to_num().sum())
    return scores.detach(), *torch.autograd.grad(loss, (q_values, d_values))


@given(problem=problems(DTYPES, integers=True))
@settings(sweep, max_examples=100)
def test_exact_arithmetic_gives_exactly_the_definition(problem):
    """With small integers nothing rounds, so scores, winners of ties and gradients must be equal bit by bit."""
    dtype = problem.queries.values.dtype
    expected = scores_and_gradients(reference.maxsim, problem, torch.float64)
    actual = scores_and_gradients(maxsim, problem, dtype)
    assert actual[0].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert torch.equal(actual[0].double(), expected[0])
    for gradient, definition in zip(actual[1:], expected[1:], strict=True):
        assert gradient.dtype == dtype
        assert torch.equal(gradient, definition.to(dtype))

    queries, documents, *options = vars(problem).values()
    in_double = [batch.with_values(batch.values.double()) for batch in (queries, documents)]
    for few in (0, blocked.FEW_ELEMENTS):
        with mock.patch.object(blocked, "FEW_ELEMENTS", few):
            _, winners = blocked.forward(ScoringOperands.of(queries, documents, *options), True, "highest")
        assert winners.dtype == winner_dtype(documents.max_length)
        assert torch.equal(winner_index(winners), maxsim_winners(*in_double, *options))


def smallest_margin(problem: Problem) -> float:
    """Least distance between the best and the second best entry of any maximum, which rounding must not bridge."""
    queries, documents = problem.queries, problem.documents
    q_values, q_mask = queries.with_values(queries.values.double()).to_padded()
    d_values, d_mask = documents.with_values(documents.values.double()).to_padded()
    similarities = torch.einsum("qsh,dth->qsdt", q_values, d_values).masked_fill(~d_mask, -torch.inf)
    floor = similarities.new_zeros(()).expand(*similarities.shape[:-1], 1)
    best = torch.cat([floor, similarities, floor - torch.inf], dim=-1)[q_mask].topk(2, dim=-1).values
    margin = (best[..., 0] - best[..., 1]).nan_to_num(nan=torch.inf)
    return margin.min().item() if margin.numel() else torch.inf


@given(problem=problems(DTYPES, integers=False))
@settings(sweep, max_examples=100)
def test_scores_and_gradients_are_within_rounding(problem):
    """Everything is summed in float32 (or float64), and a gradient is rounded to the dtype of its input once."""
    dtype = problem.queries.values.dtype
    epsilon = 1e-14 if dtype == torch.float64 else 1e-6
    expected = scores_and_gradients(reference.maxsim, problem, torch.float64)
    actual = scores_and_gradients(maxsim, problem, dtype)
    q_norms = problem.queries.values.double().nan_to_num().norm(dim=1)
    d_norms = problem.documents.values.double().nan_to_num().norm(dim=1)
    # No score can be larger than this (Cauchy and Schwarz).
    assert ((actual[0] - expected[0]).abs() <= epsilon * q_norms.sum() * d_norms.amax()).all()
    if smallest_margin(problem) < 1e-4:
        return
    terms = (expected[0].shape[1] * d_norms.amax(), expected[0].shape[1] * q_norms.sum())
    for gradient, definition, term in zip(actual[1:], expected[1:], terms, strict=True):
        bound = torch.finfo(dtype).eps / 2 * definition.abs() + epsilon * term
        assert ((gradient - definition).abs() <= bound).all()
        assert (gradient - definition).norm() <= max(2e-3, epsilon) * definition.norm() + epsilon * term


@given(problem=problems((torch.float32,), integers=False))
@settings(sweep, max_examples=40)
def test_layout_does_not_matter(problem):
    """Packed with gaps and padded hold the same tokens, so they give the same bits."""
    queries, documents = problem.queries, problem.documents
    (q_padded, q_mask), (d_padded, d_mask) = queries.to_padded(), documents.to_padded()
    masks = {"queries_mask": q_mask, "documents_mask": d_mask.to(torch.int64)}
    packed = maxsim(queries, documents, problem.candidates, zero_floor=problem.zero_floor)
    padded = maxsim(q_padded, d_padded, problem.candidates, zero_floor=problem.zero_floor, **masks)
    assert torch.equal(packed, padded)
