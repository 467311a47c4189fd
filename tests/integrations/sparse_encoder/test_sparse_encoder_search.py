"""``semantic_search`` on sparse embeddings: stock's scores, and equal ones by position. And ``semantic_search_fastmaxsim``."""

import inspect
import logging
import sys

import numpy as np
import pytest
import torch

from tests.support.edited import edited
from tests.support.examples import example
from tests.support.models import sentences
from tests.support.sparse_encoders import load_sparse

pytest.importorskip("sentence_transformers", minversion="5", reason="no SparseEncoder before Sentence Transformers 5")

from sentence_transformers import util
from sentence_transformers.sparse_encoder import search_engines

import pylate_fastmaxsim
from pylate_fastmaxsim import SparseIndex
from pylate_fastmaxsim.integrations.sparse_encoder.search_engines import semantic_search_fastmaxsim

FUNCTIONS = [util.dot_score, util.cos_sim]


def random(count: int, share: float, seed: int, largest: int = 4) -> torch.Tensor:
    """Small integers, whose inner products are exact in any order and often equal; ``share`` of them not 0."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randint(1, largest, (count, 30), generator=generator)
    return (weights * (torch.rand(count, 30, generator=generator) < share)).float()


QUERIES, DOCUMENTS = random(6, 0.15, seed=0), random(90, 0.05, seed=1)
QUERIES[4] = 0  # shares nothing with any document


def uncoalesced(dense: torch.Tensor) -> torch.Tensor:
    tensor = dense.to_sparse()
    indices, values = tensor.indices(), tensor.values() / 2
    return torch.sparse_coo_tensor(indices.repeat(1, 2).flip(1), values.repeat(2).flip(0), dense.shape)


coo = torch.Tensor.to_sparse
FORMS = {
    "coo": coo,
    "uncoalesced": uncoalesced,
    "rows": lambda dense: [row.to_sparse() for row in dense],
    "half": lambda dense: dense.half().to_sparse(),
    "double": lambda dense: dense.double().to_sparse(),
}


def expected(queries: torch.Tensor, documents: torch.Tensor, k: int, function=util.dot_score) -> list[list[dict]]:
    scores = function(queries.double(), documents.double()).float()
    order = scores.sort(dim=1, descending=True, stable=True).indices[:, :k].tolist()
    return [[{"corpus_id": i, "score": row[i].item()} for i in ids] for ids, row in zip(order, scores, strict=True)]


def scores_of(results: list[list[dict]]) -> torch.Tensor:
    return torch.tensor([[hit["score"] for hit in row] for row in results])


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("top_k", [1, 10, 90, 200])
def test_results_are_those_of_stock_with_equal_scores_by_position(form, top_k, searches):
    arguments = form(QUERIES), form(DOCUMENTS), 4, 11, top_k, util.dot_score
    stock = util.semantic_search(*arguments)
    with pylate_fastmaxsim.enabled():
        ours = util.semantic_search(*arguments)
    assert len(searches) == 1
    assert ours == expected(QUERIES, DOCUMENTS, top_k)
    assert torch.equal(scores_of(ours), scores_of(stock))
    assert {type(value) for row in ours for hit in row for value in hit.values()} == {int, float}


def test_the_default_is_the_cosine_as_in_stock(searches):
    arguments = coo(QUERIES), coo(DOCUMENTS)
    stock = util.semantic_search(*arguments, top_k=20)
    with pylate_fastmaxsim.enabled():
        ours = util.semantic_search(*arguments, top_k=20)
    assert len(searches) == 1
    torch.testing.assert_close(scores_of(ours), scores_of(stock))
    best = [[hit["corpus_id"] for hit in row] for row in ours]
    # Of documents without a common term the first come first.
    assert best[4] == list(range(20))
    assert [row[-1] for row in best] == [row[-1]["corpus_id"] for row in expected(QUERIES, DOCUMENTS, 20, util.cos_sim)]


def test_one_query_of_a_model(encoder, searches):
    model = load_sparse(encoder("bert"))
    query, documents = model.encode_query("Why is the sky blue?"), model.encode_document(sentences(30, 20))
    # None: the dot product, which the model finds out on first use.
    for similarity, function in zip((None, "cosine"), FUNCTIONS, strict=True):
        model.similarity_fn_name = similarity
        (stock,) = util.semantic_search(query, documents, score_function=function)
        with pylate_fastmaxsim.enabled():
            (ours,) = util.semantic_search(query, documents, score_function=model.similarity)
        matched = [hit["corpus_id"] for hit in stock if hit["score"]]
        assert [hit["corpus_id"] for hit in ours][: len(matched)] == matched
        torch.testing.assert_close(scores_of([ours]), scores_of([stock]))
    assert len(searches) == 2


NEGATIVE, NAN = DOCUMENTS.clone(), DOCUMENTS.clone()
NEGATIVE[3, 5], NAN[2, 7] = -1.0, torch.nan
LEFT_TO_STOCK = {
    "negative, not finite": (coo(QUERIES), coo(NEGATIVE), {}),
    "negative, not finite or": (coo(QUERIES), coo(NAN), {"top_k": 90}),
    "euclidean_sim is neither": (coo(QUERIES), coo(DOCUMENTS), {"score_function": util.euclidean_sim}),
    "some embeddings are dense": (coo(QUERIES), DOCUMENTS, {}),
    "top_k is np.int64(5)": (coo(QUERIES), coo(DOCUMENTS), {"top_k": np.int64(5)}),
}


@pytest.mark.parametrize("reason", LEFT_TO_STOCK)
def test_what_cannot_be_taken_runs_stock_with_one_line(reason, searches, caplog):
    queries, documents, options = LEFT_TO_STOCK[reason]
    stock = util.semantic_search(queries, documents, **options)
    pylate_fastmaxsim.enable()
    for _ in range(2):
        ours = util.semantic_search(queries, documents, **options)
        # Not ==, since NaN is not equal to itself.
        assert str(ours) == str(stock)
    (line,) = (line for line in caplog.messages if "search is not accelerated" in line)
    assert line.startswith("semantic_search is not accelerated (running Sentence Transformers's own): ")
    assert reason in line
    assert not searches


def test_kernels_that_cannot_be_compiled_leave_the_search_to_stock(monkeypatch, caplog):
    def search(*_):
        raise ImportError("sparse search: CUDA C++ cannot be compiled (no NVRTC); run `pip install cuda-bindings`.")

    monkeypatch.setattr("pylate_fastmaxsim.integrations.sparse_encoder.search.sparse_search", search)
    stock = util.semantic_search(coo(QUERIES), coo(DOCUMENTS))
    with pylate_fastmaxsim.enabled():
        assert util.semantic_search(coo(QUERIES), coo(DOCUMENTS)) == stock
    assert "running Sentence Transformers's own): sparse search: CUDA C++ cannot be compiled" in caplog.text


def test_dense_embeddings_and_empty_ones_are_left_to_stock_without_a_word(searches, caplog):
    cases = [
        (QUERIES, DOCUMENTS),
        (QUERIES.numpy(), DOCUMENTS.numpy()),
        (list(QUERIES), list(DOCUMENTS)),
        (coo(QUERIES[:0]), coo(DOCUMENTS)),
        (coo(QUERIES), coo(DOCUMENTS[:0])),
    ]
    stock = [util.semantic_search(*case) for case in cases]
    with caplog.at_level(logging.WARNING), pylate_fastmaxsim.enabled():
        assert [util.semantic_search(*case) for case in cases] == stock
    assert not searches and not [line for line in caplog.messages if "semantic_search" in line]


def test_an_edited_score_function_runs_as_it_is(monkeypatch, searches, caplog):
    similarity = sys.modules[util.cos_sim.__module__]
    arguments = coo(QUERIES), coo(DOCUMENTS), 100, 500, 10, util.cos_sim
    plain = util.semantic_search(*arguments)
    pylate_fastmaxsim.enable()
    edit = edited(util.normalize_embeddings, "values**2", "values.abs()")
    monkeypatch.setattr(similarity, "normalize_embeddings", edit)
    monkeypatch.setattr(sys.modules[util.semantic_search.__module__], "normalize_embeddings", edit)
    found = util.semantic_search(*arguments)
    assert not torch.allclose(scores_of(found), scores_of(plain))
    assert not searches and "normalize_embeddings is not the code of a release" in caplog.text


def test_the_search_engine_has_the_arguments_of_the_helpers():
    both = semantic_search_fastmaxsim, search_engines.semantic_search_qdrant
    ours, theirs = (inspect.signature(each).parameters.values() for each in both)
    assert [(x.name, x.default) for x in ours] == [(x.name, x.default) for x in theirs if x.name != "kwargs"]


@pytest.mark.parametrize("form", [torch.clone, torch.Tensor.to_sparse_csr, list])
def test_the_search_engine_finds_what_sentence_transformers_finds_of_documents_with_a_common_term(encoder, form):
    model = load_sparse(encoder("bert"))
    queries, corpus = model.encode_query(sentences(4, 6, seed=1)), model.encode_document(sentences(40, 20, seed=2))
    stock = util.semantic_search(queries, corpus, top_k=40, score_function=util.dot_score)
    results, seconds, index = semantic_search_fastmaxsim(form(queries), form(corpus), top_k=40, output_index=True)
    assert seconds > 0 and isinstance(index, SparseIndex) and len(index) == 40
    for ours, theirs in zip(results, stock, strict=True):
        expected = {hit["corpus_id"]: pytest.approx(hit["score"]) for hit in theirs if hit["score"]}
        assert {hit["corpus_id"]: hit["score"] for hit in ours} == expected and len(ours) == len(expected) < 40
        assert ours == sorted(ours, key=lambda hit: (-hit["score"], hit["corpus_id"]))
        assert {type(value) for hit in ours for value in hit.values()} == {int, float}
    again, seconds = semantic_search_fastmaxsim(form(queries), corpus_index=index, top_k=3)
    assert again == [hits[:3] for hits in results] and seconds > 0


def test_bad_input_of_the_search_engine_is_one_sentence():
    query = torch.ones(1, 3).to_sparse()
    with pytest.raises(ValueError, match=r"pass corpus_embeddings or corpus_index; both are None\.$"):
        semantic_search_fastmaxsim(query)
    with pytest.raises(ValueError, match="weights must be at least 0"):
        semantic_search_fastmaxsim(query, -query)
    with pytest.raises(ValueError, match="vocabulary 4 of the index, got 3"):
        semantic_search_fastmaxsim(query, torch.ones(1, 4))


def test_the_script_of_the_docs(encoder):
    names, stand_in = {"model": load_sparse(encoder("bert"))}, {'SparseEncoder("naver/splade-v3")': "model"}
    exec(example("sparse-evaluator", stand_in), names)
    assert names["metrics"][names["evaluator"].primary_metric] > 0


@pytest.mark.cuda
@pytest.mark.parametrize("function", FUNCTIONS, ids=["dot", "cosine"])
def test_on_a_gpu_the_bits_are_those_of_a_cpu(function):
    arguments = {"top_k": 20, "score_function": function}
    with pylate_fastmaxsim.enabled():
        here = util.semantic_search(coo(QUERIES), coo(DOCUMENTS), **arguments)
        assert util.semantic_search(coo(QUERIES).cuda(), coo(DOCUMENTS).cuda(), **arguments) == here
