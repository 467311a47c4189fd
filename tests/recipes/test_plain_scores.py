"""Plain PyTorch, which stands for stock PyLate in a comparison, gives the scores and gradients of the operator."""

import pytest
import torch
from pylate.scores import ColBERTScores, colbert_kd_scores

import pylate_fastmaxsim
from pylate_fastmaxsim import LogSumExp, Max, PooledScores, Softmax, TopK
from pylate_fastmaxsim.recipes.config.schema import PoolingSection
from pylate_fastmaxsim.recipes.pooling import PlainPooledScores, score_metric


def embeddings() -> list[torch.Tensor]:
    """Of 3 queries and 2 documents for each, and their masks; one document has fewer live tokens than k."""
    torch.manual_seed(0)
    queries, documents = (torch.randn(*shape, 8, dtype=torch.float64) for shape in ((3, 4), (3, 2, 9)))
    masks = [torch.rand(each.shape[:-1]) < 0.7 for each in (queries, documents)]
    masks[1][0, 0] = torch.arange(9) < 2
    return [queries.requires_grad_(), documents.requires_grad_(), *masks]


@pytest.mark.parametrize("own_documents", [False, True])
@pytest.mark.parametrize("pooling", [Max(), TopK(3), TopK(20), Softmax(0.3), LogSumExp(0.3)])
def test_scores_and_gradients_are_those_of_the_operator(pooling, own_documents):
    results = []
    for metric in (PlainPooledScores(pooling, own_documents), PooledScores(pooling, own_documents=own_documents)):
        given = embeddings()
        scores = metric(*given)
        scores.sin().sum().backward()
        results.append((scores, given[0].grad, given[1].grad))
    torch.testing.assert_close(*results)


def test_the_maximum_is_pylates_own_in_its_dtype():
    queries, documents, _, _ = embeddings()
    for own_documents, stock in ((False, ColBERTScores()), (True, colbert_kd_scores)):
        with torch.autocast("cpu", torch.bfloat16):
            plain = PlainPooledScores(Max(), own_documents)(queries, documents)
            expected = stock(queries, documents)
        assert plain.dtype == expected.dtype and plain.equal(expected)


def test_the_metric_is_that_of_the_plugin_where_it_is_on():
    assert isinstance(score_metric(PoolingSection(top_k=4), own_documents=False), PlainPooledScores)
    with pylate_fastmaxsim.enabled():
        assert isinstance(score_metric(PoolingSection(top_k=4), own_documents=True), PooledScores)
