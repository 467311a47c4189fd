import pytest
import torch

from pylate_fastmaxsim import LogSumExp, Max, Softmax, TokenBatch, TopK, pooled_scores
from pylate_fastmaxsim.diagnostics import injection
from pylate_fastmaxsim.diagnostics.injection import (
    EVERYWHERE,
    KINDS,
    PARTIAL,
    RANDOM,
    SPIKE,
    TARGETED,
    injected_tokens,
    injection_sweep,
)  # fmt: skip
from pylate_fastmaxsim.diagnostics.robustness import grades_of, retrieval_metrics

POOLINGS = (Max(), TopK(3), Softmax(0.3), LogSumExp(0.2))


def unit(*shape: int, seed: int = 0) -> torch.Tensor:
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.normalize(numbers, dim=-1)


@pytest.fixture
def case() -> tuple[TokenBatch, TokenBatch, torch.Tensor]:
    """Ragged queries and documents of few and of no tokens, with tokens left out and a document that is no result."""
    mask = torch.ones(3, 4, dtype=torch.bool)
    mask[1, 2] = mask[2, 3] = False
    queries = TokenBatch.from_padded(unit(3, 4, 8), mask)
    documents = TokenBatch.from_list([unit(length, 8, seed=length) for length in (5, 2, 1, 0, 9, 4, 7)])
    grades = grades_of([[0, 2], [4], [5]], 7)
    grades[1, 5] = torch.nan
    return queries, documents, grades


@pytest.mark.parametrize("pooling", POOLINGS, ids=lambda pooling: type(pooling).__name__)
def test_rankings_are_those_of_documents_that_hold_the_tokens(case, pooling, monkeypatch):
    queries, documents, grades = case
    monkeypatch.setattr(injection, "QUERIES_AT_ONCE", 2)
    monkeypatch.setattr(injection, "SIMILARITIES_AT_ONCE", 60)
    rows = injection_sweep(queries, documents, grades, [Max(), pooling], counts=(0, 2, 5), seed=3)
    tokens, own = injected_tokens(queries, 5, seed=3), documents.values.split(documents.lengths.tolist())
    for row in (row for row in rows if row["pooling"] == pooling):
        scores = []
        for query in range(3):
            some = tokens[TARGETED if row["attack"] == EVERYWHERE else row["attack"]][query, : row["tokens"]]
            attacked = [
                torch.cat((each, some)) if row["attack"] == EVERYWHERE or grades[query, place] <= 0 else each
                for place, each in enumerate(own)
            ]
            batch = TokenBatch.from_list(attacked)
            scores.append(pooled_scores(queries.select(torch.tensor([query])), batch, pooling=pooling)[0])
        for name, values in retrieval_metrics(torch.stack(scores), grades).items():
            assert row[name] == pytest.approx(values.mean().item(), abs=1e-6), row


def test_winners_and_weights_by_hand():
    query, document = torch.eye(4)[:2], torch.eye(4)[1:3]
    queries = TokenBatch.from_padded(torch.eye(4)[None, :3], torch.tensor([[1, 1, 0]]))
    documents = TokenBatch.from_list([query, document])
    poolings = [Max(), TopK(2), Softmax(0.5)]
    rows = injection_sweep(queries, documents, grades_of([[0]], 2), poolings, counts=(0, 2), noise=0.0)
    found = {(row["attack"], row["tokens"], row["pooling"]): row for row in rows}
    # One query token's winner is new; the other's is as good as before, and the earlier one stays.
    for attack in (TARGETED, EVERYWHERE):
        assert found[attack, 2, Max()]["hijack_rate"] == found[attack, 2, Max()]["injected_weight"] == 0.5
    # The first token's similarities are 0, 0 and then 1, 0; the second's 1, 0 and then 0, 1.
    assert found[TARGETED, 2, TopK(2)]["injected_weight"] == 0.5
    e = torch.tensor(2.0).exp().item()
    first, second = (1 + e) / (3 + e), (1 + e) / (2 + 2 * e)
    assert found[TARGETED, 2, Softmax(0.5)]["injected_weight"] == pytest.approx((first + second) / 2, abs=1e-6)
    assert found[TARGETED, 0, Max()]["recall@1"] == 1 and found[TARGETED, 0, Max()]["hijack_rate"] == 0
    assert found[TARGETED, 2, TopK(2)]["recall@1"] == 0 and found[EVERYWHERE, 2, TopK(2)]["recall@1"] == 1


def test_injected_tokens_lie_near_all_tokens_of_their_query_in_turn(case):
    queries, _, _ = case
    tokens = injected_tokens(queries, count=64, noise=0.5)
    targeted, random = tokens[TARGETED], tokens[RANDOM]
    values, mask = queries.to_padded()
    cosine = torch.einsum("qsd,qkd->qsk", values, targeted).masked_fill(~mask[..., None], -1)
    nearest = cosine.argmax(dim=1)
    for query, live in enumerate(mask):
        counts = torch.bincount(nearest[query], minlength=4)
        assert (counts[live] > 64 / live.sum() / 2).all() and (counts[~live] == 0).all()
    assert 0.8 < cosine.amax(dim=1).mean() < 0.95  # 1 / sqrt(1.25) = 0.894
    assert abs(torch.einsum("qsd,qkd->qsk", values, random).mean()) < 0.1
    exact = injected_tokens(queries, count=64, noise=0.0)
    for query, live in enumerate(mask):
        own = values[query, live]
        met = (own @ exact[PARTIAL][query].T).amax(dim=1) > 0.999
        assert met.sum() == 2 and (exact[SPIKE][query] @ own.T > 0).sum() >= 3 * 64 / 2
        if len(own) == 3:
            mean = torch.nn.functional.normalize(own.sum(dim=0), dim=0)
            torch.testing.assert_close(exact[SPIKE][query], mean.expand(64, -1))
    for kind in KINDS:
        torch.testing.assert_close(tokens[kind].norm(dim=2), torch.ones(3, 64))
    assert torch.equal(injected_tokens(queries, 64)[RANDOM], random)
    assert not torch.equal(injected_tokens(queries, 64, seed=1)[RANDOM], random)
    with pytest.raises(ValueError, match="each query must have a live token"):
        injected_tokens(TokenBatch.from_list([torch.ones(1, 2), torch.ones(0, 2)]), 3)


def test_counts_are_refused_that_are_no_numbers_of_tokens(case):
    for counts in ((), (-1,), (1.5,), (2, 2)):
        with pytest.raises(ValueError, match="counts must be different whole numbers from 0"):
            injection_sweep(*case, POOLINGS, counts=counts)
