"""Pooled scores against the float64 definition: values, gradients, ties, what is not finite, and what is refused."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pylate_fastmaxsim import LogSumExp, Max, Softmax, TokenBatch, TopK, maxsim, pooled_scores, reference
from tests.support.ragged_batches import CANDIDATES, batches
from tests.support.strategies import Problem, problems

POOLINGS = (TopK(2), TopK(4), TopK(9), Softmax(1.0), Softmax(0.1), LogSumExp(0.5))
sweep = settings(deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), max_examples=60)


def scores_and_gradients(function, problem: Problem, dtype: torch.dtype, pooling):
    q_values, d_values = problem.values(dtype)
    queries, documents = problem.queries.with_values(q_values), problem.documents.with_values(d_values)
    scores = function(queries, documents, problem.candidates, pooling=pooling)
    weights = torch.randint(-2, 3, scores.shape, generator=torch.Generator().manual_seed(0))
    # The sums keep the graph connected where nothing is live.
    loss = (scores * weights.to(scores.dtype)).sum() + 0 * (q_values.nan_to_num().sum() + d_values.nan_to_num().sum())
    return scores.detach(), *torch.autograd.grad(loss, (q_values, d_values))


@given(problem=problems((torch.float64,), integers=False), pooling=st.sampled_from(POOLINGS))
@settings(sweep)
def test_scores_and_gradients_are_those_of_the_definition(problem, pooling):
    expected = scores_and_gradients(reference.pooled_scores, problem, torch.float64, pooling)
    actual = scores_and_gradients(pooled_scores, problem, torch.float64, pooling)
    for ours, definition in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, definition, rtol=1e-9, atol=1e-9)


@given(problem=problems((torch.float32, torch.bfloat16, torch.float16), integers=True), k=st.integers(1, 6))
@settings(sweep)
def test_of_equal_similarities_the_lower_positions_count(problem, k):
    """Small integers tie all the time, and nothing but the mean rounds."""
    dtype = problem.queries.values.dtype
    expected = scores_and_gradients(reference.pooled_scores, problem, torch.float64, TopK(k))
    actual = scores_and_gradients(pooled_scores, problem, dtype, TopK(k))
    assert actual[0].dtype == torch.float32
    torch.testing.assert_close(actual[0].double(), expected[0], rtol=1e-6, atol=1e-5)
    for gradient, definition in zip(actual[1:], expected[1:], strict=True):
        assert gradient.dtype == dtype
        bound = 2 * torch.finfo(dtype).eps
        torch.testing.assert_close(gradient.double(), definition, rtol=bound, atol=16 * bound)


@pytest.mark.parametrize("pooling", POOLINGS, ids=str)
@pytest.mark.parametrize("candidates", [None, CANDIDATES], ids=["all", "candidates"])
def test_gradcheck(pooling, candidates):
    queries, documents = batches(torch.float64, dim=3)

    def score(q_values, d_values):
        return pooled_scores(
            queries.with_values(q_values), documents.with_values(d_values), candidates, pooling=pooling
        )

    q_values, d_values = (batch.values.nan_to_num().requires_grad_() for batch in (queries, documents))
    assert torch.autograd.gradcheck(score, (q_values, d_values))


def test_maximum_and_the_best_one_are_maxsim():
    queries, documents = batches()
    expected = maxsim(queries, documents)
    assert torch.equal(pooled_scores(queries, documents, pooling=Max()), expected)
    assert torch.equal(pooled_scores(queries, documents, pooling=TopK(1)), expected)


@pytest.mark.parametrize("pooling", [Max(), TopK(1), TopK(2), Softmax(1.0), LogSumExp(0.5)], ids=str)
def test_only_the_maximum_starts_at_the_floor(pooling):
    queries, documents = batches()
    floor = torch.ones(len(documents), dtype=torch.bool)
    scores = pooled_scores(queries, documents, pooling=pooling, zero_floor=floor)
    floored, free = maxsim(queries, documents, zero_floor=floor), pooled_scores(queries, documents, pooling=pooling)
    assert torch.equal(scores, floored if isinstance(pooling, Max) else free) and not torch.equal(floored, free)


@pytest.mark.parametrize("pooling", [kind(value) for kind in (Softmax, LogSumExp) for value in (1e-30, 1e30)], ids=str)
def test_the_least_and_the_largest_temperature_give_numbers(pooling):
    queries, documents = batches()
    assert pooled_scores(queries, documents, pooling=pooling).isfinite().all()


@pytest.mark.parametrize("pooling", [TopK(2), Softmax(0.5), LogSumExp(0.5)], ids=str)
def test_nan_in_a_live_token_is_in_its_scores_and_reaches_its_gradient(pooling):
    queries, documents = torch.ones(2, 2, 3), torch.ones(3, 4, 3)
    documents[1, 2, 0] = torch.nan
    documents.requires_grad_()
    scores = pooled_scores(queries, documents, pooling=pooling)
    assert scores.isnan().tolist() == [[False, True, False]] * 2
    queries = queries.requires_grad_()
    pooled_scores(queries, documents, pooling=pooling).sum().backward()
    assert queries.grad.isnan().any() and not documents.grad[[0, 2]].isnan().any()


@pytest.mark.parametrize("pooling", [TopK(3), Softmax(0.5), LogSumExp(0.5)], ids=str)
def test_autocast_and_masks_are_as_in_maxsim(pooling):
    generator = torch.Generator().manual_seed(0)
    queries, documents = torch.randn(3, 5, 8, generator=generator), torch.randn(4, 7, 8, generator=generator)
    masks = {"queries_mask": torch.ones(3, 5), "documents_mask": torch.rand(4, 7, generator=generator) < 0.6}
    masks["queries_mask"][1, 3:] = 0
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scores = pooled_scores(queries, documents, pooling=pooling, **masks)
    rounded = [
        TokenBatch.from_padded(values.bfloat16().double(), mask)
        for values, mask in zip((queries, documents), masks.values(), strict=True)
    ]
    assert scores.dtype == torch.float32
    torch.testing.assert_close(
        scores.double(), reference.pooled_scores(*rounded, pooling=pooling), rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize("pooling", [TopK(2), Softmax(0.5), LogSumExp(0.5)], ids=str)
@pytest.mark.compile
def test_one_graph_and_an_exported_program_give_the_eager_bits(pooling):
    queries, documents = torch.randn(2, 3, 8), torch.randn(3, 5, 8)

    def both(function):
        leaves = queries.clone().requires_grad_(), documents.clone().requires_grad_()
        scores = function(*leaves)
        return scores, *torch.autograd.grad(scores.sum(), leaves)

    def score(q, d):
        return pooled_scores(q, d, pooling=pooling)

    compiled = torch.compile(score, fullgraph=True, backend="aot_eager")
    assert all(map(torch.equal, both(compiled), both(score)))

    class Module(torch.nn.Module):
        def forward(self, q, d):
            return score(q, d)

    exported = torch.export.export(Module(), (queries, documents)).module()
    assert torch.equal(exported(queries, documents), score(queries, documents))


@pytest.mark.parametrize("pooling", [TopK(2), Softmax(0.5)], ids=str)
def test_second_derivatives_are_refused(pooling):
    queries, documents = torch.randn(2, 3, 8, requires_grad=True), torch.randn(3, 5, 8)
    (gradient,) = torch.autograd.grad(
        pooled_scores(queries, documents, pooling=pooling).sum(), queries, create_graph=True
    )
    with pytest.raises(NotImplementedError, match="pooled_scores: second derivatives"):
        gradient.sum().backward()


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: TopK(0), ValueError, "TopK: k must be at least 1, got 0"),
        (lambda: TopK(2.5), TypeError, "TopK: k must be an integer, at least 1, got 2.5"),
        (lambda: TopK(True), TypeError, "TopK: k must be an integer, at least 1, got True"),
        (lambda: Softmax(0), ValueError, "Softmax: temperature must be a number from 1e-30 to 1e30, got 0"),
        (lambda: Softmax(1e-300), ValueError, "Softmax: temperature must be a number from 1e-30 to 1e30, got 1e-300"),
        (lambda: LogSumExp(1e40), ValueError, "LogSumExp: temperature must be a number from 1e-30 to 1e30, got 1e+40"),
        (lambda: Softmax(float("nan")), ValueError, "temperature must be a number from 1e-30 to 1e30, got nan"),
        (lambda: LogSumExp("1"), TypeError, "LogSumExp: temperature must be a number from 1e-30 to 1e30, got '1'"),
        (lambda: pooled_scores(torch.ones(1, 1, 1), torch.ones(1, 1, 1), pooling="max"), TypeError, "must be Max()"),
        (lambda: pooled_scores(torch.ones(1, 1, 1), torch.ones(1, 1, 1), pooling=TopK), TypeError, "must be Max()"),
    ],
)
def test_what_is_no_pooling_is_one_sentence(make, error, message):
    with pytest.raises(error) as raised:
        make()
    assert message in str(raised.value)


def test_numbers_of_numpy_are_taken():
    assert TopK(np.int64(3)) == TopK(3) and Softmax(np.float32(0.5)) == Softmax(0.5)
