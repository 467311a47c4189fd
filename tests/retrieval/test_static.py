"""Static late interaction: its sparse vectors are MaxSim's maxima, bounds bound, and exact results are MaxSim's."""

import itertools

import numpy as np
import pytest
import torch

from pylate_fastmaxsim import BM25, SparseBatch, StaticLateInteraction
from pylate_fastmaxsim.retrieval.static import documents, model, rows
from pylate_fastmaxsim.retrieval.static.tokens import TokenIds
from tests.support import static_cases as cases
from tests.support.static_cases import CUTS, VALUES, check, maxsim, tables, texts


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize(
    ("threshold", "cap", "keep"), [*((*cut, "excess") for cut in CUTS), *((*cut, "value") for cut in VALUES)]
)
def test_vectors_bounds_and_exact_results_are_those_of_the_definition(threshold, cap, keep, device):
    check(device, threshold, cap, keep, positive=threshold == "lowest")  # a document without tokens may be the worst


def same(ours: SparseBatch, other: SparseBatch) -> bool:
    return all(torch.equal(getattr(ours, name), getattr(other, name)) for name in ("offsets", "terms", "weights"))


@pytest.mark.parametrize(("threshold", "cap"), [("lowest", None), (-0.2, None), (0.4, None), (0.4, 3)])
def test_sizes_of_blocks_and_the_way_do_not_matter(threshold, cap, monkeypatch):
    made = StaticLateInteraction(*tables("cpu"), threshold=threshold, neighbours=cap)
    asked, collection = texts(6, 9, seed=1), texts(30, 20, seed=2)
    batch, found = made.documents(collection), made.search(asked, collection, 7)
    for share, size in itertools.product((0.0, 1.0), (1, 1000)):
        monkeypatch.setattr(documents, "LARGEST_SHARE", share)
        for name in ("SIMILARITIES_AT_ONCE", "WEIGHTS_AT_ONCE", "ENTRIES_AT_ONCE"):
            monkeypatch.setattr(documents, name, size)
        for name in ("ROWS_AT_ONCE", "DOCUMENTS_AT_ONCE", "TOKENS_AT_ONCE", "QUERIES_AT_ONCE", "DISTINCT_FROM"):
            monkeypatch.setattr(rows, name, size)
        monkeypatch.setattr(model, "BATCH", 1 + size % 50)
        made = StaticLateInteraction(*tables("cpu"), threshold=threshold, neighbours=cap)
        # A table of neighbours grows with the tokens that occur.
        parts = [made.documents(collection.part(at, min(at + size, 32))) for at in range(0, 32, size)]
        again, results = SparseBatch.concatenate(parts), made.search(asked, collection, 7)
        # float64 rounds in the order of a block, which float32 seldom shows.
        assert torch.equal(again.terms, batch.terms) and torch.equal(again.offsets, batch.offsets)
        torch.testing.assert_close(again.weights, batch.weights, rtol=2e-7, atol=1e-9)
        assert torch.equal(results[1], found[1])
        torch.testing.assert_close(results[0], found[0], rtol=2e-7, atol=0)


def test_a_model_at_another_threshold_is_that_of_the_threshold():
    made = StaticLateInteraction(*tables("cpu"), threshold=0.4)
    collection = texts(30, 20, seed=2)
    before = made.documents(collection)
    for threshold in (0.7, "lowest"):
        expected = StaticLateInteraction(*tables("cpu"), threshold=threshold).documents(collection)
        assert same(made.with_threshold(threshold).documents(collection), expected)
    assert same(made.documents(collection), before)


def test_equal_scores_come_in_the_order_of_positions_however_many_there_are():
    made = StaticLateInteraction(tables("cpu")[0], threshold=0.4)
    collection = TokenIds.from_lists([[7, 8], [1, 2, 3]] * 100)
    scores, positions = made.search(TokenIds.from_lists([[7]]), collection, 3)
    assert positions.tolist() == [[0, 2, 4]] and len({*scores[0].tolist()}) == 1


def test_weights_of_both_sides_are_those_of_maxsim_with_scaled_vectors():
    """Norms as weights give MaxSim of the vectors as they are. Tokens of a skiplist are left out."""
    raw = tables("cpu")
    asked, collection = texts(12, 9, seed=1), texts(60, 25, seed=2)
    own = torch.rand(2, cases.VOCABULARY, generator=torch.Generator().manual_seed(1))
    own[:, 9] = 0
    weighted = [torch.nn.functional.normalize(raw[side], dim=1) * own[side, :, None] for side in (0, 1)]
    for (of_queries, of_documents), scaled in ((("norms", "norms"), raw), (own, weighted)):
        expected = maxsim(StaticLateInteraction(*scaled, threshold=0, normalize=False), asked, collection)
        options = {"query_weights": of_queries, "document_weights": of_documents}
        for threshold in ("lowest", 0.3):
            made = StaticLateInteraction(*raw, threshold=threshold, **options)
            scores, positions = made.search(asked, collection, 62)
            torch.testing.assert_close(scores, expected.gather(1, positions).float(), rtol=1e-5, atol=1e-5)
            assert bool((scores.diff(dim=1) <= 0).all()) and positions.sort().values.tolist() == [[*range(62)]] * 14

    skipping = StaticLateInteraction(*raw, threshold=0.1, skiplist=[5], query_skiplist=[9])
    assert torch.equal(skipping.queries(TokenIds.from_lists([[5, 9, 5]])).terms.int(), torch.tensor([5]))
    with_token, without = (skipping.documents(TokenIds.from_lists([row])) for row in ([5, 1, 5], [1]))
    assert same(with_token, without)


def test_what_cannot_be_is_refused(tmp_path):
    queries, stored = tables("cpu")
    weights = torch.ones(cases.VOCABULARY)
    for options, sentence in (
        ({"document_vectors": stored[:5]}, r"both tables must have one shape and device, got \(90, 8\)"),
        ({"document_vectors": stored.int()}, r"document_vectors must be \[V, d\], floating point"),
        ({"document_vectors": stored / 0}, "document_vectors must be finite"),
        ({"threshold": "low"}, "threshold must be a number or \"lowest\", got 'low'"),
        ({"threshold": float("nan")}, "threshold must be a number"),
        ({"neighbours": 0}, "neighbours must be at least 1, got 0"),
        ({"query_weights": "bm25"}, 'query_weights must be None, "idf", "norms" or a tensor, got \'bm25\''),
        ({"query_weights": -weights}, r"query_weights must be \[V\] with V = 90, finite and at least 0"),
        ({"document_weights": weights[1:]}, r"document_weights must be .* got shape \(89,\)"),
        ({"document_weights": "idf"}, "document_weights must be None, a BM25"),
        (
            {"document_weights": BM25(), "threshold": 0},
            'with BM25 or keep="value" the threshold must be above 0, got 0',
        ),
        ({"keep": "all"}, 'keep must be "excess" or "value", got \'all\''),
        ({"threshold": 1}, 'threshold must be below 1, which only rounding exceeds; .* with keep="value", got 1'),
        ({"skiplist": [90]}, r"skiplist must be token ids from 0 to 89, got \[90\]"),
    ):
        with pytest.raises(ValueError, match=f"^StaticLateInteraction: {sentence}"):
            StaticLateInteraction(queries, **{"threshold": 0.5, **options})
    for wrong in ({"k1": -1.0}, {"b": 1.5}, {"power": 0}):
        with pytest.raises(ValueError, match=r"^BM25: \w+ must be"):
            BM25(**wrong)

    made = StaticLateInteraction(queries, threshold=np.float32(0.5))
    unsaved = StaticLateInteraction(queries, tokenizer=lambda texts: texts, threshold=0.5)
    tokens = texts(3, 5, seed=0)
    of_other = SparseBatch.from_lists([], 3)
    for call, sentence in (
        (lambda: made.documents(["a"]), "documents: the model has no tokenizer"),
        (lambda: unsaved.save(tmp_path), "save: the tokenizer must be of the tokenizers library .* got function"),
        (lambda: made.queries(TokenIds.from_lists([[90]])), "queries: token ids must be from 0 to 89"),
        (lambda: made.bound(of_other), "bound: queries must have the vocabulary 90, got 3"),
        (lambda: made.search(tokens, tokens, 0), "search: k must be at least 1, got 0"),
    ):
        with pytest.raises(ValueError, match=rf"^StaticLateInteraction.{sentence}"):
            call()
    with pytest.raises(TypeError, match="documents: texts must be a list of strings, or TokenIds, got str"):
        made.documents("a")
