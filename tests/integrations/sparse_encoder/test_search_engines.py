"""``semantic_search_fastmaxsim`` beside Sentence Transformers' own search and helpers."""

import inspect

import pytest
import torch

from tests.support.examples import example
from tests.support.models import sentences
from tests.support.sparse_encoders import load_sparse

pytest.importorskip("sentence_transformers", minversion="5", reason="no SparseEncoder before Sentence Transformers 5")

from sentence_transformers import util
from sentence_transformers.sparse_encoder import search_engines

from pylate_fastmaxsim import SparseIndex
from pylate_fastmaxsim.integrations.sparse_encoder.search_engines import semantic_search_fastmaxsim


def test_its_arguments_are_those_of_the_helpers():
    both = semantic_search_fastmaxsim, search_engines.semantic_search_qdrant
    ours, theirs = (inspect.signature(each).parameters.values() for each in both)
    assert [(x.name, x.default) for x in ours] == [(x.name, x.default) for x in theirs if x.name != "kwargs"]


@pytest.mark.parametrize("form", [torch.clone, torch.Tensor.to_sparse_csr, list])
def test_it_finds_what_sentence_transformers_finds_of_documents_with_a_common_term(encoder, form):
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


def test_bad_input_is_one_sentence():
    query = torch.ones(1, 3).to_sparse()
    with pytest.raises(ValueError, match=r"pass corpus_embeddings or corpus_index; both are None\.$"):
        semantic_search_fastmaxsim(query)
    with pytest.raises(ValueError, match="weights must be at least 0"):
        semantic_search_fastmaxsim(query, -query)
    with pytest.raises(ValueError, match="vocabulary 4 of the index, got 3"):
        semantic_search_fastmaxsim(query, torch.ones(1, 4))


def test_the_scripts_of_the_docs(encoder):
    names, stand_in = {"model": load_sparse(encoder("bert"))}, {'SparseEncoder("naver/splade-v3")': "model"}
    exec(example("sparse-evaluator", stand_in), names)
    assert names["metrics"][names["evaluator"].primary_metric] > 0
    exec(example("search-engine", stand_in), names)
    assert len(names["index"]) == 2 and names["results"][0][0]["score"] > 0
