"""The pooling kernels on a CPU through Triton's interpreter, against float64. Run with TRITON_INTERPRET=1."""

import pytest
import torch

pytest.importorskip("triton")

from pylate_fastmaxsim import LogSumExp, Softmax, TokenBatch, TopK
from pylate_fastmaxsim.kernels.maxsim import tiles as forward_tiles
from pylate_fastmaxsim.kernels.maxsim.tiles import ForwardTiles
from pylate_fastmaxsim.kernels.pooled import launch
from pylate_fastmaxsim.kernels.pooled.launch import DocumentGradientTiles, QueryGradientTiles
from tests.support.chosen_tiles import choose_tiles
from tests.support.interpreter import interpreted  # noqa: F401
from tests.support.pooled_exactness import check, run
from tests.support.ragged_batches import CANDIDATES, batches, ragged

pytestmark = [pytest.mark.interpret, pytest.mark.usefixtures("interpreted")]

# Small tiles: the interpreter pays per operation and per element, and several tiles must take part.
TILES = {
    "forward": ForwardTiles(16, 32, 64, 3, 4, 1),
    "query_gradient": QueryGradientTiles(16, 16, 64, 64, 4, 1),
    "document_gradient": DocumentGradientTiles(16, 16, 64, 64, 4, 1),
}
# A vector in several chunks.
CHUNKS = {
    "forward": ForwardTiles(16, 32, 16, 3, 4, 1),
    "query_gradient": QueryGradientTiles(16, 16, 16, 32, 4, 1),
    "document_gradient": DocumentGradientTiles(16, 16, 16, 32, 4, 1),
}
OF_64 = TILES | {"forward": ForwardTiles(16, 64, 64, 3, 4, 1)}
DOCUMENTS = (7, 0, 70, 3, 33, 1)


@pytest.fixture(autouse=True)
def _several_documents_a_program(monkeypatch):
    # So few rows would otherwise leave one document to each program.
    monkeypatch.setattr(forward_tiles, "_ENOUGH_ROWS", 0)
    monkeypatch.setattr(launch, "_ENOUGH_PROGRAMS", 5)


@pytest.mark.parametrize("pooling", [Softmax(1.0), LogSumExp(0.5), TopK(2), TopK(4)], ids=str)
@pytest.mark.parametrize("candidates", [None, CANDIDATES], ids=["all", "candidates"])
@pytest.mark.parametrize("masked", [False, True], ids=["packed", "masked"])
def test_ragged(pooling, candidates, masked, monkeypatch):
    choose_tiles(monkeypatch, launch, **TILES)
    check(*batches(dim=24, documents=DOCUMENTS, masked=masked), candidates, pooling=pooling)


@pytest.mark.parametrize("pooling", [Softmax(0.3), LogSumExp(0.5), TopK(3)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half(pooling, dtype, monkeypatch):
    choose_tiles(monkeypatch, launch, **OF_64)
    # Few numbers may round worse than the root mean square of many.
    check(*batches(dtype, dim=24, documents=DOCUMENTS), pooling=pooling, slack=2.0)


@pytest.mark.parametrize("pooling", [Softmax(4.0), TopK(3)], ids=str)
@pytest.mark.parametrize("candidates", [None, CANDIDATES], ids=["all", "candidates"])
def test_vectors_in_chunks_and_queries_of_several_tiles(pooling, candidates, monkeypatch):
    choose_tiles(monkeypatch, launch, **CHUNKS)
    check(*batches(dim=40, queries=(20, 5, 33, 0, 5)), candidates, pooling=pooling)


@pytest.mark.parametrize("k", [5, 40])
@pytest.mark.parametrize("candidates", [None, CANDIDATES], ids=["all", "candidates"])
def test_more_than_a_few(k, candidates, monkeypatch):
    choose_tiles(monkeypatch, launch, **OF_64)
    check(*batches(dim=24, documents=(7, 0, 130, 3, 33, 1)), candidates, pooling=TopK(k))


@pytest.mark.parametrize("k", [3, 9])
def test_ties_go_to_the_lower_positions(k, monkeypatch):
    choose_tiles(monkeypatch, launch, **OF_64)
    generator = torch.Generator().manual_seed(0)
    queries = ragged(generator, [5, 9, 0], 4, torch.float32, integers=True, masked=True)
    documents = ragged(generator, [100, 2, 64], 4, torch.float32, integers=True, masked=True)
    check(queries, documents, pooling=TopK(k), ties=True)


@pytest.mark.parametrize("pooling", [Softmax(1.0), LogSumExp(1.0), TopK(2), TopK(9)], ids=str)
def test_nan_and_documents_without_tokens(pooling, monkeypatch):
    choose_tiles(monkeypatch, launch, **OF_64)
    values = torch.ones(3, 4, 16)
    values[1, 2, 0] = torch.nan
    documents = TokenBatch.from_padded(values, torch.tensor([[1, 1, 1, 1]] * 2 + [[0] * 4]))
    queries = TokenBatch.from_padded(torch.ones(2, 2, 16))
    scores, _, grad_q, grad_d = run(queries, documents, None, pooling, torch.ones(2, 3))
    assert scores.isnan().tolist() == [[False, True, False]] * 2 and not scores[:, 2].any()
    assert not grad_d[8:].any() and not grad_d[:4].isnan().any()


@pytest.mark.parametrize("pooling", [Softmax(1.0), TopK(2)], ids=str)
def test_nothing_to_score(pooling, monkeypatch):
    choose_tiles(monkeypatch, launch, **TILES)
    for queries, documents in ((0, 2), (2, 0)):
        batch = TokenBatch.from_padded(torch.ones(queries, 3, 16)), TokenBatch.from_padded(torch.ones(documents, 3, 16))
        scores, _, *gradients = run(*batch, None, pooling, torch.ones(queries, documents))
        assert scores.shape == (queries, documents) and not any(gradient.any() for gradient in gradients)
