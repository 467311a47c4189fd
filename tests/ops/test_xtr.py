"""XTR scores on the CPU: against PyLate, against the float64 definition, and every property that is promised."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pylate.scores import XTRKDScores, XTRScores
from torch.nn import functional as F

from pylate_fastmaxsim import TokenBatch, reference, xtr_scores
from pylate_fastmaxsim._operands import ScoringOperands
from pylate_fastmaxsim.cpu import xtr as blocked
from tests.support.defined_winners import xtr_winners
from tests.support.exactness import winner_index
from tests.support.strategies import problems

sweep = settings(deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


def embeddings(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(shape, generator=generator, dtype=torch.float64), dim=-1).to(dtype)


def masks(count: int, length: int, seed: int = 1) -> torch.Tensor:
    """Padding behind every document but the first, and holes."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.arange(length) < torch.randint(1, length, (count, 1), generator=generator)
    mask &= torch.rand(count, length, generator=generator) < 0.9
    mask[0] = True
    return mask


def gradients(scores: torch.Tensor, *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
    weights = torch.randn(scores.shape, generator=torch.Generator().manual_seed(2)).to(scores)
    return torch.autograd.grad((scores * weights).sum(), leaves)


def close(ours, wanted) -> None:
    torch.testing.assert_close(ours, wanted, rtol=0, atol=1e-5 * wanted.abs().max().item())


@pytest.mark.parametrize("function", [xtr_scores, reference.xtr_scores])
@pytest.mark.parametrize("own, k, masked", [(False, 1, False), (False, 60, True), (True, 7, True), (True, 110, False)])
def test_same_as_pylate(function, own, k, masked):
    queries = embeddings(5, 4, 8, dtype=torch.float32).requires_grad_()
    documents = embeddings(5, 3, 16, 8, seed=1, dtype=torch.float32).requires_grad_()
    q_mask = masks(5, 4, 2) if masked else None
    d_mask = masks(15, 16) if masked else None
    stock = (XTRKDScores if own else XTRScores)(k=k)(
        queries, documents, q_mask, d_mask.view(5, 3, 16) if masked else None
    )
    candidates = torch.arange(15).view(5, 3) if own else None
    zero_floor = ~d_mask.all(dim=1) if masked else None
    scores = function(
        TokenBatch.from_padded(queries, q_mask),
        TokenBatch.from_padded(documents.flatten(0, 1), d_mask),
        k,
        candidates,
        zero_floor=zero_floor,
    )
    close(scores, stock)
    for ours, wanted in zip(gradients(scores, queries, documents), gradients(stock, queries, documents), strict=True):
        close(ours, wanted)


def test_all_tokens_pass_as_in_pylate_where_k_is_their_number():
    queries, documents = embeddings(3, 4, 2), embeddings(3, 2, 2, 2, seed=1)
    stock = XTRScores(k=12)(queries, documents)
    assert (stock < 0).any(), "documents whose tokens are all negative must take part"
    for k in (12, 13, 1000):
        torch.testing.assert_close(xtr_scores(queries, documents.flatten(0, 1), k).float(), stock)


def arguments(queries, documents, candidates, zero_floor, k, normalizer="positive"):
    return ScoringOperands.of(queries, documents, candidates, zero_floor), k, normalizer == "retrieved"


DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
KS = st.sampled_from((1, 2, 3, 8, 30, 100, 5000))
NORMALIZERS = ("positive", "retrieved")


@given(problem=problems(DTYPES, integers=True), k=KS, normalizer=st.sampled_from(NORMALIZERS))
@settings(sweep, max_examples=100)
def test_exact_arithmetic_gives_exactly_the_definition(problem, k, normalizer):
    """With small integers nothing rounds before the division, and ties abound."""
    queries, documents = problem.queries, problem.documents
    in_double = [batch.with_values(batch.values.double()) for batch in (queries, documents)]
    zero_floor = problem.zero_floor if normalizer == "positive" else None
    rest = k, problem.candidates, zero_floor, normalizer
    _, _, winners = blocked.forward(
        *arguments(queries, documents, problem.candidates, zero_floor, k, normalizer), True, "highest"
    )
    assert torch.equal(winner_index(winners), xtr_winners(*in_double, *rest))

    results = []
    for function, dtype in ((reference.xtr_scores, torch.float64), (xtr_scores, queries.values.dtype)):
        q_values, d_values = problem.values(dtype)
        scores = function(
            queries.with_values(q_values), documents.with_values(d_values), k, problem.candidates,
            zero_floor=zero_floor, normalizer=normalizer,
        )  # fmt: skip
        weights = torch.randint(-2, 3, scores.shape, generator=torch.Generator().manual_seed(0)).to(scores)
        loss = (scores * weights).sum() + 0 * (q_values.nan_to_num().sum() + d_values.nan_to_num().sum())
        results.append((scores.detach(), *torch.autograd.grad(loss, (q_values, d_values))))
    (exact, *exact_gradients), (scores, *ours) = results
    assert scores.dtype == (torch.float64 if queries.values.dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(scores.double(), exact, rtol=1e-6, atol=0)
    for gradient, definition in zip(ours, exact_gradients, strict=True):
        assert gradient.dtype == queries.values.dtype
        epsilon = torch.finfo(torch.float32).eps if gradient.dtype == torch.float64 else torch.finfo(gradient.dtype).eps
        largest = definition.abs().max() if definition.numel() else 0
        torch.testing.assert_close(gradient.double(), definition, rtol=epsilon, atol=1e-5 * float(largest))


@pytest.mark.parametrize("tokens, of_k, elements", [(1, 1, 1), (20, 1, 100), (4096, 4, 2**20)])
def test_blocks_do_not_matter(monkeypatch, tokens, of_k, elements):
    queries = TokenBatch.from_padded(embeddings(6, 5, 8), masks(6, 5, 3))
    documents = TokenBatch.from_padded(embeddings(9, 12, 8, seed=1), masks(9, 12))
    expected = reference.xtr_scores(queries, documents, 20)
    monkeypatch.setattr(blocked, "BLOCK_TOKENS", tokens)
    monkeypatch.setattr(blocked, "BLOCK_TOKENS_OF_K", of_k)
    monkeypatch.setattr(blocked, "BLOCK_ELEMENTS", elements)
    torch.testing.assert_close(xtr_scores(queries, documents, 20), expected)


def test_all_that_equal_the_kth_largest_pass():
    queries = torch.tensor([[[1.0, 0.0]]])
    documents = torch.tensor([[[0.5, 0.0], [0.1, 0.0]], [[0.5, 0.0], [0.2, 0.0]], [[0.4, 0.0], [0.4, 0.0]]])
    assert xtr_scores(queries, documents, k=1).tolist() == [[0.5, 0.5, 0.0]]
    torch.testing.assert_close(xtr_scores(queries, documents, k=3), torch.tensor([[0.5, 0.5, 0.4]]))


@pytest.mark.parametrize("k", [1, 4, 12, 100])
@pytest.mark.parametrize("normalizer", NORMALIZERS)
def test_what_is_not_finite_wins_as_in_the_definition(k, normalizer):
    generator = torch.Generator().manual_seed(0)
    numbers = torch.tensor([torch.nan, torch.inf, -torch.inf, -torch.inf, -1.0, 1.0, 2.0])
    queries = TokenBatch.from_padded(torch.tensor([[[1.0], [-1.0]], [[2.0], [1.0]]]))
    for _ in range(20):
        some = torch.randint(2, len(numbers), (5, 4, 1), generator=generator)
        some[torch.rand(some.shape, generator=generator) < 0.1] -= 2
        documents = TokenBatch.from_padded(numbers[some], torch.rand(5, 4, generator=generator) < 0.7)
        rest = k, None, None, normalizer
        _, _, winners = blocked.forward(*arguments(queries, documents, None, None, k, normalizer), True, "highest")
        expected = xtr_winners(queries, documents, *rest)
        assert torch.equal(winner_index(winners), expected)
        scores = xtr_scores(queries, documents, k, normalizer=normalizer)
        torch.testing.assert_close(scores, reference.xtr_scores(queries, documents, *rest), equal_nan=True)
    live = TokenBatch.from_padded(torch.full((1, 3, 1), -torch.inf), torch.tensor([[0, 1, 1]]))
    assert xtr_winners(queries, live, 100).tolist() == [[1, 1, 1, 1]]


def test_nan_shows_where_it_is_used_and_takes_a_place():
    queries, documents = embeddings(2, 3, 8), embeddings(4, 5, 8, seed=1)
    documents[1, 2] = torch.nan
    stock = XTRScores(k=4)(queries, documents.unflatten(0, (2, 2)))
    ours = xtr_scores(queries, documents, 4)
    assert ours.isnan().tolist() == [[False, True, False, False]] * 2
    torch.testing.assert_close(ours.float(), stock, equal_nan=True)
    mask = torch.ones(4, 5, dtype=torch.bool)
    mask[1, 2] = False
    assert not xtr_scores(queries, documents, 4, documents_mask=mask).isnan().any()
    documents[1:] = torch.nan
    assert xtr_scores(queries, documents, 4)[:, 0].tolist() == [0.0, 0.0]


def test_autocast_and_dtypes():
    queries, documents = embeddings(2, 3, 8, dtype=torch.float32), embeddings(4, 5, 8, seed=1, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        scores = xtr_scores(queries, documents, 4)
    assert scores.dtype == torch.float32
    assert torch.equal(scores, xtr_scores(queries.bfloat16(), documents.bfloat16(), 4))


def test_k_may_be_more_than_a_kernel_can_count():
    queries, documents = embeddings(2, 3, 8), embeddings(4, 5, 8)
    assert torch.equal(xtr_scores(queries, documents, 2**63), xtr_scores(queries, documents, 20))


def test_errors():
    queries, documents = embeddings(2, 3, 8), embeddings(4, 5, 8)
    with pytest.raises(ValueError, match="xtr_scores: k must be at least 1, got 0"):
        xtr_scores(queries, documents, 0)
    for k in (2.5, "3", True):
        with pytest.raises(TypeError, match=f"xtr_scores: k must be an integer, at least 1, got {k!r}."):
            xtr_scores(queries, documents, k)
    with pytest.raises(ValueError, match="xtr_scores: queries have d = 8 and documents d = 4"):
        xtr_scores(queries, documents[..., :4], 1)
    with pytest.raises(ValueError, match='xtr_scores: normalizer must be "positive" or "retrieved", got .paper'):
        xtr_scores(queries, documents, 1, normalizer="paper")
    with pytest.raises(ValueError, match='xtr_scores: zero_floor goes with normalizer="positive" only'):
        xtr_scores(queries, documents, 1, zero_floor=torch.ones(4, dtype=torch.bool), normalizer="retrieved")
    with pytest.raises(TypeError, match="xtr_scores: candidates must be a tensor .* got list"):
        xtr_scores(queries, documents, 1, [[0], [0]])


def test_what_is_retrieved_counts_whatever_its_sign():
    """Of the first document a token passes for both tokens of the query, of the second for one, of the third for none."""
    queries = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
    documents = torch.tensor([[[-0.5, -0.2], [-3.0, 4.0]], [[-0.7, -1.0], [-2.0, -3.0]], [[-4.0, -5.0], [-6.0, -7.0]]])
    scores = xtr_scores(queries, documents, k=2, normalizer="retrieved")
    torch.testing.assert_close(scores, torch.tensor([[(-0.5 + 4.0) / 2, -0.7, 0.0]]))
    # A token that does not pass counts as 0 there, and that is more.
    torch.testing.assert_close(xtr_scores(queries, documents, k=2), torch.tensor([[4.0, 0.0, 0.0]]))


@pytest.mark.parametrize("candidates, normalizer", [(None, "positive"), (torch.tensor([[0, 2], [1, 1]]), "retrieved")])
def test_registered_operator(candidates, normalizer):
    queries, documents = embeddings(2, 3, 8).requires_grad_(), embeddings(3, 5, 8, seed=1).requires_grad_()
    q, d = TokenBatch.from_padded(queries), TokenBatch.from_padded(documents, masks(3, 5))
    torch.library.opcheck(
        torch.ops.pylate_fastmaxsim.xtr_forward,
        (*ScoringOperands.of(q, d, candidates), 6, normalizer == "retrieved", True),
        raise_exception=True,
    )


def test_compiles_without_a_break():
    queries, documents = embeddings(2, 3, 8).requires_grad_(), embeddings(3, 5, 8, seed=1).requires_grad_()

    def loss(queries, documents):
        return (xtr_scores(queries * 2, documents, 6) * torch.arange(3)).sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    results = [torch.autograd.grad(function(queries, documents), (queries, documents)) for function in (loss, compiled)]
    torch.testing.assert_close(*results)
    torch._dynamo.reset()
