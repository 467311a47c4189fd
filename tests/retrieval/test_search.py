"""Streaming search returns what sorting all scores returns, whatever the batches."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pylate_fastmaxsim import TokenBatch, maxsim
from pylate_fastmaxsim.retrieval import search as module
from pylate_fastmaxsim.retrieval.search import search
from pylate_fastmaxsim.retrieval.topk import largest


def documents(count: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 6, (count,), generator=generator).tolist()
    # Small integers, so that many scores are equal and all are exact.
    return [torch.randint(-2, 3, (length, 3), generator=generator).float() for length in lengths]


def batches(sequences: list[torch.Tensor], sizes: list[int]):
    begin = 0
    for size in [*sizes, len(sequences)]:
        part = sequences[begin : begin + size]
        begin += size
        yield TokenBatch.from_list(part or [torch.empty(0, 3)]).select(torch.arange(len(part)))


@settings(max_examples=30, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 20), max_size=5),
    k=st.integers(1, 30),
    queries=st.integers(1, 5),
    held=st.sampled_from([1, 30, 1 << 26]),
)
def test_equal_to_sorting_all_scores(sizes, k, queries, held):
    sequences = documents(40)
    batch = TokenBatch.from_list([torch.randint(-2, 3, (4, 3)).float() for _ in range(queries)])
    everything = maxsim(batch, TokenBatch.from_list(sequences))
    expected, order = everything.sort(dim=1, descending=True, stable=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "SCORES_AT_ONCE", held)
        learned = batch.with_values(batch.values.clone().requires_grad_())
        scores, positions = search(learned, batches(sequences, sizes), k)
    assert not scores.requires_grad
    assert torch.equal(scores, expected[:, :k])
    assert torch.equal(positions, order[:, :k])


def test_nothing_of_a_batch_is_kept_but_its_best(monkeypatch):
    held = []
    merge = module.merge

    def recording(best, positions, scores, first, k):
        held.append((best.shape[1], scores.numel()))
        return merge(best, positions, scores, first, k)

    monkeypatch.setattr(module, "merge", recording)
    monkeypatch.setattr(module, "SCORES_AT_ONCE", 20)
    queries = TokenBatch.from_list(documents(7, seed=1))
    search(queries, batches(documents(50), [10] * 5), k=3)
    assert max(best for best, _ in held) == 3 and max(scores for _, scores in held) <= 20


def test_no_documents_and_a_bad_k():
    queries = TokenBatch.from_list([torch.ones(2, 3)] * 2)
    scores, positions = search(queries, [], k=5)
    assert scores.shape == positions.shape == (2, 0)
    with pytest.raises(ValueError, match="search: k must be at least 1, got 0."):
        search(queries, [], k=0)
    with pytest.raises(TypeError, match="search: k must be an integer, at least 1, got True."):
        search(queries, [], k=True)


def test_what_are_no_batches_is_refused():
    batch = TokenBatch.from_list([torch.ones(2, 3)] * 2)
    with pytest.raises(TypeError, match="search: queries must be a TokenBatch, got Tensor."):
        search(torch.ones(2, 2, 3), [batch], k=1)
    for one, kind in ((batch, "TokenBatch"), (torch.ones(2, 2, 3), "Tensor")):
        with pytest.raises(TypeError, match=f"as a list of TokenBatch, got one {kind}."):
            search(batch, one, k=1)
    with pytest.raises(TypeError, match="as a list of TokenBatch, got NoneType."):
        search(batch, None, k=1)
    with pytest.raises(TypeError, match="^search: each of documents must be a TokenBatch, got list.$"):
        search(batch, [batch, [torch.ones(2, 3)]], k=1)


def test_a_nan_shows():
    sequences = documents(10)
    sequences[7] = torch.full((1, 3), torch.nan)
    scores, positions = search(TokenBatch.from_list([torch.ones(2, 3)]), batches(sequences, [4, 4]), k=2)
    assert positions[0, 0] == 7 and scores[0, 0].isnan()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("k", [1, 7, 4000])
def test_the_best_are_those_of_a_stable_sort(k, device):
    generator = torch.Generator().manual_seed(0)
    few = torch.tensor([0.0, -0.0, 1.0, -1.0, torch.inf, -torch.inf, torch.nan, -torch.nan, 1e-45, -1e-45, 3e38, -3e38])
    some = few[torch.randint(0, len(few), (20, 2000), generator=generator)]
    many = torch.randn(20, 2000, generator=generator)
    for scores in (many, some, torch.cat([some, many], dim=1), many[:, :0]):
        expected = scores.argsort(dim=1, descending=True, stable=True)[:, :k]
        assert torch.equal(largest(scores.to(device), min(k, scores.shape[1])).cpu(), expected)
    doubles = many.double()
    assert torch.equal(largest(doubles, min(k, 2000)), doubles.argsort(dim=1, descending=True)[:, :k])
