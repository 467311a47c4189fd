"""``PooledScores`` gives the definition's scores in every form of input that a loss or an evaluator has."""

import pickle

import numpy as np
import pytest
import torch

from pylate_fastmaxsim import LogSumExp, Max, PooledScores, Softmax, TokenBatch, TopK, reference


@pytest.fixture
def padded():
    """Queries ``[3, 4, 8]``, documents ``[3, 2, 5, 8]`` and their masks."""
    torch.manual_seed(0)
    queries_mask, documents_mask = torch.rand(3, 4) < 0.7, torch.rand(3, 2, 5) < 0.7
    queries_mask[:, 0] = documents_mask[..., 0] = True
    return torch.randn(3, 4, 8), torch.randn(3, 2, 5, 8), queries_mask, documents_mask


@pytest.mark.parametrize("pooling", [Max(), TopK(3), Softmax(0.2), LogSumExp(0.2)])
@pytest.mark.parametrize("length_normalize", [False, True])
def test_scores_are_those_of_the_definition(padded, pooling, length_normalize):
    queries, documents, queries_mask, documents_mask = padded
    batch = TokenBatch.from_padded(queries, queries_mask)
    of_all = TokenBatch.from_padded(documents.flatten(0, 1), documents_mask.flatten(0, 1))
    expected = reference.pooled_scores(batch, of_all, pooling=pooling).float()
    if length_normalize:
        expected = expected / queries_mask.sum(1, keepdim=True)
    own = expected.view(3, 3, 2)[range(3), range(3)]

    metric = PooledScores(pooling, length_normalize=length_normalize)
    torch.testing.assert_close(metric(*padded), expected)
    first = queries, documents[:, 0], queries_mask, documents_mask[:, 0]
    torch.testing.assert_close(metric(*first), expected[:, ::2])
    metric = PooledScores(pooling, length_normalize=length_normalize, own_documents=True)
    torch.testing.assert_close(metric(*padded), own)
    torch.testing.assert_close(metric(*first), own[:, 0])


def test_lists_and_arrays_are_scored_as_evaluators_give_them(padded):
    queries, documents, queries_mask, documents_mask = padded
    metric = PooledScores(TopK(2), length_normalize=True)
    first = queries, documents[:, 0], queries_mask, documents_mask[:, 0]
    lists = ([matrix[live] for matrix, live in zip(*pair, strict=True)] for pair in (first[::2], first[1::2]))
    torch.testing.assert_close(metric(*lists), metric(*first))
    arrays = [np.asarray(each) for each in padded]
    torch.testing.assert_close(metric(*arrays), metric(*padded))
    # Padded with zeros and without a mask, as PyLate's evaluators score.
    zeros = queries * queries_mask[..., None], documents * documents_mask[..., None]
    torch.testing.assert_close(metric(*zeros), metric(*padded))


def test_the_pooling_is_read_at_each_call_and_travels_with_a_pickle(padded):
    metric = PooledScores(TopK(3), length_normalize=True)
    assert repr(pickle.loads(pickle.dumps(metric))) == repr(metric)
    metric.pooling = Softmax(0.5)
    expected = PooledScores(Softmax(0.5), length_normalize=True)(*padded)
    assert metric(*padded).equal(expected)
    metric.pooling = 4
    with pytest.raises(TypeError, match=r"pooling must be Max\(\), .* got 4"):
        metric(*padded)
