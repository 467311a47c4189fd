"""Compressed documents on the CPU beyond their numbers: ties, NaN, empty batches, block sizes and memory."""

import pytest
import torch

from pylate_fastmaxsim import CompressedBatch, TokenBatch, compress, maxsim, reference
from pylate_fastmaxsim.cpu import compressed as blocked
from pylate_fastmaxsim.cpu import maxsim as blocked_maxsim
from pylate_fastmaxsim.ops.compressed import _prepared
from tests.support.largest_tensor import LargestTensor
from tests.support.ragged_batches import CANDIDATES, batches
from tests.support.residual_codecs import random_codec

FORMATS = ("int8", "int8 by token", "fp8", "residual")


def compressed_as(batch: TokenBatch, format: str) -> CompressedBatch:
    if format == "residual":
        return compress(batch, random_codec(batch.dim, 2))
    return compress(batch, format.split()[0], per_token="token" in format)


def scores_and_gradient(queries, documents, candidates=None, function=maxsim):
    values = queries.values.detach().clone().requires_grad_()
    scores = function(queries.with_values(values), documents, candidates)
    weights = torch.arange(1, scores.numel() + 1).view(scores.shape).to(scores.dtype)
    return scores.detach(), torch.autograd.grad((scores * weights).nan_to_num().sum(), values)[0]


@pytest.mark.parametrize("candidates", [None, CANDIDATES], ids=["all", "candidates"])
@pytest.mark.parametrize("by_token", [False, True])
def test_whole_numbers_give_the_definition_bit_by_bit(candidates, by_token):
    """With scales of 1 nothing rounds and ties abound; the first of equal maxima wins."""
    queries, documents = batches(dim=9)
    generator = torch.Generator().manual_seed(3)
    queries, documents = (
        batch.with_values(torch.randint(-1, 2, batch.values.shape, generator=generator).float())
        for batch in (queries, documents)
    )
    for batch in (queries, documents):
        batch.values[:, 0] = 127
    documents = compress(documents, "int8", per_token=by_token)
    assert documents.tokens.scales[documents.tokens.scales > 0].eq(1).all()
    actual = scores_and_gradient(queries, documents, candidates)
    expected = scores_and_gradient(queries, documents, candidates, reference.compressed_maxsim)
    assert torch.equal(actual[0].double(), expected[0]) and torch.equal(actual[1], expected[1])


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
@pytest.mark.parametrize("format", FORMATS)
def test_a_query_token_that_is_not_finite_gives_nan_where_it_is_scored(format, number):
    queries, documents = batches(masked=False)
    documents = compressed_as(documents, format)
    expected = maxsim(queries, documents)
    queries.values[queries.starts[2], 4] = number
    scores = maxsim(queries, documents)
    if format == "residual" and number == torch.inf:
        assert not scores[2][documents.lengths > 0].isfinite().any()
    else:
        assert torch.equal(scores[2].isnan(), documents.lengths > 0)
    assert torch.equal(scores[2] == 0, documents.lengths == 0)
    others = torch.tensor([0, 1, 3, 4])
    assert torch.equal(scores[others], expected[others])


@pytest.mark.parametrize("candidates", [None, CANDIDATES], ids=["all", "candidates"])
@pytest.mark.parametrize("format", FORMATS)
def test_block_sizes_do_not_matter(format, candidates, monkeypatch):
    queries, documents = batches(torch.float64)
    documents = compressed_as(documents, format)
    expected = scores_and_gradient(queries, documents, candidates)
    for size in (1, 40):
        for name in ("BLOCK_ELEMENTS", "SLAB_ELEMENTS", "FEW_ELEMENTS"):
            monkeypatch.setattr(blocked_maxsim, name, size)
        monkeypatch.setattr(blocked, "DECOMPRESSED_ELEMENTS", size)
        actual = scores_and_gradient(queries, documents, candidates)
        torch.testing.assert_close(actual, expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("format", FORMATS)
def test_empty_batches(format):
    queries, documents = batches()
    none = torch.tensor([], dtype=torch.int64)
    documents = compressed_as(documents, format)
    assert maxsim(queries, documents.select(none)).shape == (5, 0)
    assert maxsim(queries.select(none), documents).shape == (0, 6)
    assert maxsim(queries, documents, torch.zeros(5, 0, dtype=torch.int64)).shape == (5, 0)
    assert not maxsim(queries, documents.select(torch.tensor([1, 1]))).any()
    nothing = compressed_as(TokenBatch.from_list([torch.empty(0, queries.dim)] * 2), format)
    for function in (maxsim, reference.compressed_maxsim):
        assert function(queries, nothing).shape == (5, 2) and not function(queries, nothing).any()
    with pytest.raises(ValueError, match="candidates must be from 0 to Nd - 1 = 5, got 6 to 6"):
        maxsim(queries, documents, torch.full((5, 1), 6))


@pytest.mark.parametrize("format", FORMATS)
def test_documents_are_decompressed_in_blocks(format, monkeypatch):
    monkeypatch.setattr(blocked_maxsim, "BLOCK_ELEMENTS", 1 << 14)
    monkeypatch.setattr(blocked, "DECOMPRESSED_ELEMENTS", 1 << 14)
    queries, documents = batches(dim=64, queries=(8,) * 3, documents=(50,) * 200, masked=False)
    documents = compressed_as(documents, format)
    operands = _prepared(queries, documents, None)
    with LargestTensor() as largest:
        scores, winners = blocked.forward(operands, True, "highest")
        blocked.backward(scores, winners, operands)
    assert largest.bytes < documents.decompress().values.nbytes / 3
