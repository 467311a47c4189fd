"""Streaming search returns what sorting all scores returns, also where its candidates are scored again."""

import copy
import pickle
from unittest import mock

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
from pylate_fastmaxsim.retrieval.topk import largest
from tests.support.corpora import codec, documents, grouped, unit_documents

QUERIES = TokenBatch.from_list([torch.ones(2, 3)] * 2)


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
    monkeypatch.setattr(module, "SCORES_AT_ONCE", 20)
    with mock.patch.object(module, "merge", wraps=module.merge) as merge:
        search(TokenBatch.from_list(documents(7, seed=1)), batches(documents(50), [10] * 5), k=3)
    held = [call.args for call in merge.call_args_list]
    assert max(best.shape[1] for best, *_ in held) == 3 and max(scores.numel() for _, _, scores, *_ in held) <= 20


def test_without_documents_there_is_no_result():
    assert [each.shape for each in search(QUERIES, [], k=5)] == [(2, 0)] * 2


@pytest.mark.parametrize(
    ("arguments", "error", "sentence"),
    [
        ((QUERIES, [], 0), ValueError, "k must be at least 1, got 0."),
        ((torch.ones(2, 3), [QUERIES], 1), ValueError, r"queries must be \[N, L, d\], got one text of shape \(2, 3\)"),
        ((QUERIES, 3, 1), TypeError, "documents must be batches of documents, as a list of TokenBatch, got int"),
        ((QUERIES, [QUERIES, "text"], 1), TypeError, r"documents\[1\] must be a TokenBatch, .* got str"),
    ],
)
def test_what_cannot_be_searched_is_refused(arguments, error, sentence):
    with pytest.raises(error, match=f"^search: {sentence}"):
        search(*arguments)


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
    """Scores, positions and how many are of the last tenth. Of equal scores the lower position comes first."""
    last = candidates.shape[1] - -(-candidates.shape[1] // 10)
    found: tuple[list, list, list] = [], [], []
    for i, row in enumerate(candidates.tolist()):
        best = sorted((-scores[i, j].item(), j, rank >= last) for rank, j in enumerate(row))[:k]
        negated, positions, late = zip(*best, strict=True)
        for part, value in zip(found, ([-score for score in negated], [*positions], sum(late)), strict=True):
            part.append(value)
    return found


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
    assert [each.tolist() for each in (*found, found.from_last_tenth)] == [scores, positions, late]
    assert isinstance(found, tuple) and found[0] is found.scores and found[1] is found.positions


def test_a_function_ranks_the_candidates(corpora):
    coarse, _, in_memory, finer = corpora
    queries = TokenBatch.from_list(documents(8, seed=2))
    all_scores = maxsim(queries, finer)
    cross_encoder = mock.Mock(side_effect=lambda positions: all_scores.gather(1, positions))
    found = search(queries, coarse, 5, rescore=cross_encoder, candidates_per_result=3)
    candidates = search(queries, [in_memory], 15).positions
    assert cross_encoder.call_count == 1 and torch.equal(cross_encoder.call_args.args[0], candidates)
    assert (found.scores.tolist(), found.positions.tolist()) == expected(candidates, all_scores, 5)[:2]
    assert search(queries, coarse, 50, rescore=cross_encoder).scores.shape == (8, 50)  # 200 candidates, of 60 documents
    for wrong in (torch.ones(8, 3), torch.ones(8, 20, dtype=torch.int64), [1.0]):
        with pytest.raises(ValueError, match=r"search: rescore must return scores, floating point \[8, 20\], got "):
            search(queries, coarse, 5, rescore=lambda positions, wrong=wrong: wrong)


def test_only_the_documents_that_are_candidates_are_read(corpora, monkeypatch):
    coarse, fine, *_ = corpora
    lengths, queries = fine.select(range(COUNT)).lengths, TokenBatch.from_list(documents(3, seed=2))
    monkeypatch.setattr(module, "TOKENS_PER_BATCH", 20)
    with mock.patch.object(module.Corpus, "select", autospec=True, side_effect=module.Corpus.select) as select:
        found = search(queries, coarse, 10, rescore=fine, candidates_per_result=1)
    read = [call.args[1] for call in select.call_args_list]
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
    compressed = compress(TokenBatch.from_list(sequences), format)
    exact = compressed_maxsim(queries, compressed)
    for found in (
        search(queries, read, 5),
        search(queries, read.batches(tokens_per_batch=20), 5),
        search(queries, plain, 5, rescore=read, candidates_per_result=COUNT),
    ):
        for wanted in (exact.gather(1, found.positions), exact.topk(5).values):
            torch.testing.assert_close(found.scores.double(), wanted, rtol=1e-5, atol=1e-5)
    pooled = pooled_scores(queries, compressed.decompress(), pooling=TopK(2)).topk(5).values
    for documents_, options in ((read, {}), (plain, {"rescore": read, "candidates_per_result": COUNT})):
        torch.testing.assert_close(search(queries, documents_, 5, pooling=TopK(2), **options).scores, pooled)


def test_progress_counts_documents_and_a_result_can_be_copied(corpora):
    coarse, fine, *_ = corpora
    queries, counts = TokenBatch.from_list(documents(3)), []
    found = search(queries, coarse.batches(tokens_per_batch=20), 2, progress=counts.append)
    assert sum(counts) == COUNT and len(counts) > 5 and found.from_last_tenth is None
    result = search(queries, coarse, 2, rescore=fine)
    for other in (pickle.loads(pickle.dumps(result)), copy.deepcopy(result)):
        assert all(map(torch.equal, (*other, other.from_last_tenth), (*result, result.from_last_tenth)))


def test_what_cannot_rescore_is_refused(corpora, tmp_path):
    coarse, *_ = corpora
    queries = TokenBatch.from_list(documents(3))
    shorter = write_corpus(tmp_path / "shorter", grouped(documents(7), 7), torch.float32)
    narrow = write_corpus(tmp_path / "narrow", [TokenBatch.from_list([torch.ones(1, 2)] * COUNT)])
    searched = []
    for options, error, said in (
        ({"rescore": shorter}, ValueError, "rescore must hold the same documents, but has 7 where 60 are searched"),
        ({"rescore": narrow}, ValueError, "rescore must have the d = .*has d = 2"),
        ({"rescore": [shorter]}, TypeError, "rescore must be None, a Corpus or a function, got list"),
        ({"candidates_per_result": 0}, ValueError, "candidates_per_result must be at least 1, got 0"),
    ):
        with pytest.raises(error, match=f"^search: {said}"):
            search(queries, coarse, 2, progress=searched.append, **options)
    assert not searched  # it says so before hours of search
    with pytest.raises(ValueError, match="the same documents, but has 7 where 60 are searched"):
        search(queries, coarse.batches(), 2, rescore=shorter)


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
