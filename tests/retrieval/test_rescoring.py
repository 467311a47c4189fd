"""Rescoring of the best candidates, from a finer corpus or by a function."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pylate_fastmaxsim import Max, TokenBatch, TopK, maxsim, pooled_scores
from pylate_fastmaxsim.compressed import compress
from pylate_fastmaxsim.reference import compressed_maxsim
from pylate_fastmaxsim.retrieval import search as module
from pylate_fastmaxsim.retrieval.corpus import write_corpus
from pylate_fastmaxsim.retrieval.search import search
from tests.support.corpora import codec, documents, grouped, unit_documents

COUNT = 60


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    """Coarse documents; the finer ones, as a corpus of two ranks; and these in memory."""
    coarse, fine = documents(COUNT, seed=0), documents(COUNT, seed=1)
    folder = tmp_path_factory.mktemp("corpora")
    write_corpus(folder / "fine", grouped(fine[:25], 9), torch.float32, rank=(0, 2))
    write_corpus(folder / "fine", grouped(fine[25:], 9), torch.float32, rank=(1, 2))
    first = write_corpus(folder / "coarse", grouped(coarse, 9), torch.float32)
    return first, module.Corpus(folder / "fine"), TokenBatch.from_list(coarse), TokenBatch.from_list(fine)


def expected(candidates: torch.Tensor, scores: torch.Tensor, k: int) -> tuple[list, list, list]:
    """By sorting: of equal scores the lower position first."""
    last = candidates.shape[1] - -(-candidates.shape[1] // 10)
    rows = [
        sorted((-scores[i, j].item(), j, rank >= last) for rank, j in enumerate(row.tolist()))[:k]
        for i, row in enumerate(candidates)
    ]
    return (
        [[-score for score, _, _ in row] for row in rows],
        [[position for _, position, _ in row] for row in rows],
        [sum(late for _, _, late in row) for row in rows],
    )


@settings(max_examples=40, deadline=None)
@given(
    k=st.integers(1, 25),
    c=st.integers(1, 4),
    tokens=st.sampled_from([1, 17, 1 << 20]),
    pairs=st.sampled_from([1, 13, 1 << 18]),
    pooling=st.sampled_from([Max(), TopK(2)]),
)
def test_the_best_candidates_in_the_order_of_the_finer_corpus(corpora, k, c, tokens, pairs, pooling):
    coarse, fine, in_memory, finer = corpora
    queries = TokenBatch.from_list([tokens for tokens in documents(8, seed=2) if len(tokens)])
    candidates = search(queries, [in_memory], c * k, pooling=pooling).positions
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "TOKENS_PER_BATCH", tokens)
        patch.setattr(module, "PAIRS_AT_ONCE", pairs)
        found = search(queries, coarse, k, pooling=pooling, rescore=fine, candidates_per_result=c)
    scores, positions, late = expected(candidates, pooled_scores(queries, finer, pooling=pooling), k)
    assert found.scores.tolist() == scores
    assert found.positions.tolist() == positions and found.from_last_tenth.tolist() == late
    pair = found
    assert isinstance(pair, tuple) and pair[0] is found.scores and pair[1] is found.positions and len(pair) == 2


def test_a_function_ranks_the_candidates(corpora):
    coarse, _, in_memory, finer = corpora
    queries = TokenBatch.from_list(documents(8, seed=2))
    all_scores, asked = maxsim(queries, finer), []

    def cross_encoder(positions):
        asked.append(positions)
        return torch.stack([all_scores[i, row] for i, row in enumerate(positions)])

    found = search(queries, coarse, 5, rescore=cross_encoder, candidates_per_result=3)
    candidates = search(queries, [in_memory], 15).positions
    assert len(asked) == 1 and torch.equal(asked[0], candidates)
    assert (found.scores.tolist(), found.positions.tolist()) == expected(candidates, all_scores, 5)[:2]
    assert search(queries, coarse, 50, rescore=cross_encoder).scores.shape == (8, 50)  # 200 candidates, of 60 documents
    for wrong in (torch.ones(8, 3), torch.ones(8, 20, dtype=torch.int64), [1.0]):
        with pytest.raises(ValueError, match=r"search: rescore must return scores, floating point \[8, 20\], got "):
            search(queries, coarse, 5, rescore=lambda positions, wrong=wrong: wrong)


def test_only_the_documents_that_are_candidates_are_read(corpora, monkeypatch):
    coarse, fine, *_ = corpora
    lengths, read, select = fine.select(range(COUNT)).lengths, [], module.Corpus.select
    queries = TokenBatch.from_list(documents(3, seed=2))
    monkeypatch.setattr(module, "TOKENS_PER_BATCH", 20)
    monkeypatch.setattr(module.Corpus, "select", lambda *args: read.append(args[1]) or select(*args))
    found = search(queries, coarse, 10, rescore=fine, candidates_per_result=1)
    assert torch.equal(torch.cat(read), found.positions.unique()) and len(read) > 3
    assert max(int(lengths[block].sum()) for block in read) < 20 + int(lengths.max())


def test_queries_are_rounded_to_the_dtype_of_a_corpus(corpora, tmp_path):
    coarse, _, in_memory, finer = corpora
    bf16 = write_corpus(tmp_path, [finer])
    queries = TokenBatch.from_list([tokens + 1e-3 for tokens in documents(8, seed=2)])
    assert all(map(torch.equal, search(queries, coarse, 5), search(queries, [in_memory], 5)))
    rounded, documents_ = (each.with_values(each.values.bfloat16()) for each in (queries, finer))
    assert all(map(torch.equal, search(queries, bf16, 5), search(rounded, [documents_], 5)))
    found = search(queries, coarse, 5, rescore=bf16, candidates_per_result=COUNT)
    assert all(map(torch.equal, found, search(rounded, [documents_], 5)))


@pytest.mark.parametrize("format", ["int8", "fp8", codec()], ids=["int8", "fp8", "residual"])
def test_compressed_corpora_are_searched_and_rescored_from(format, corpora, tmp_path):
    sequences = unit_documents(COUNT)
    read = write_corpus(tmp_path, grouped(sequences, 9), format=format)
    plain = write_corpus(tmp_path / "plain", grouped(sequences, 9))
    queries = TokenBatch.from_list(unit_documents(8, seed=3))
    exact = compressed_maxsim(queries, compress(TokenBatch.from_list(sequences), format))
    for found in (
        search(queries, read, 5),
        search(queries, read.batches(tokens_per_batch=20), 5),
        search(queries, plain, 5, rescore=read, candidates_per_result=COUNT),
    ):
        torch.testing.assert_close(found.scores.double(), exact.gather(1, found.positions), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found.scores.double(), exact.topk(5).values, rtol=1e-5, atol=1e-5)
    with pytest.raises((TypeError, ValueError), match="decompress"):
        search(queries, read, 5, pooling=TopK(2))


def test_progress_counts_documents(corpora):
    coarse, fine, *_ = corpora
    counts = []
    search(TokenBatch.from_list(documents(3)), coarse.batches(tokens_per_batch=20), 2, progress=counts.append)
    assert sum(counts) == COUNT and len(counts) > 5
    result = search(TokenBatch.from_list(documents(3)), coarse, 2)
    assert result.from_last_tenth is None


def test_a_result_can_be_copied_and_pickled(corpora):
    coarse, fine, *_ = corpora
    result = search(TokenBatch.from_list(documents(3)), coarse, 2, rescore=fine)
    for other in (pickle.loads(pickle.dumps(result)), copy.deepcopy(result)):
        assert torch.equal(other.scores, result.scores) and torch.equal(other.positions, result.positions)
        assert torch.equal(other.from_last_tenth, result.from_last_tenth)


def test_what_cannot_rescore_is_refused(corpora, tmp_path):
    coarse, *_ = corpora
    queries = TokenBatch.from_list(documents(3))
    shorter = write_corpus(tmp_path, grouped(documents(7), 7), torch.float32)
    with pytest.raises(ValueError, match="rescore must hold the same documents, but has 7 where 60 are searched"):
        search(queries, coarse.batches(), 2, rescore=shorter)
    narrow = write_corpus(tmp_path / "narrow", [TokenBatch.from_list([torch.ones(1, 2)] * 60)])
    searched = []
    for rescore, said in ((shorter, "the same documents, but has 7"), (narrow, "must have the d = .*has d = 2")):
        with pytest.raises(ValueError, match=said):
            search(queries, coarse, 2, rescore=rescore, progress=searched.append)
    assert not searched  # it says so before hours of search
    with pytest.raises(TypeError, match="rescore must be None, a Corpus or a function, got list"):
        search(queries, coarse, 2, rescore=[shorter])
    with pytest.raises(ValueError, match="candidates_per_result must be at least 1, got 0"):
        search(queries, coarse, 2, rescore=coarse, candidates_per_result=0)


@pytest.mark.cuda
def test_on_a_gpu_the_same_documents_are_found(corpora):
    coarse, fine, *_ = corpora
    queries = TokenBatch.from_list(documents(50, seed=2))
    on_gpu = TokenBatch.from_list([tokens.cuda() for tokens in documents(50, seed=2)])
    with torch.cuda.stream(torch.cuda.Stream()):
        found = search(on_gpu, coarse, 10, rescore=fine)
        found = [tensor.cpu() for tensor in (*found, found.from_last_tenth)]
    expected = search(queries, coarse, 10, rescore=fine)
    assert all(map(torch.equal, found, (*expected, expected.from_last_tenth)))
