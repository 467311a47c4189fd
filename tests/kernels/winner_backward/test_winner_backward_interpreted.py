"""Gradients of winners chosen at random, in Triton's interpreter. Run with TRITON_INTERPRET=1."""

import pytest
import torch

pytest.importorskip("triton")

from pylate_fastmaxsim import TokenBatch
from pylate_fastmaxsim._operands import ScoringOperands
from pylate_fastmaxsim.kernels.winner_backward import launch
from pylate_fastmaxsim.kernels.winner_backward.tiles import (
    CandidateGradientTiles,
    DocumentGradientTiles,
    QueryGradientTiles,
)
from tests.support import ragged_batches
from tests.support.chosen_tiles import choose_tiles
from tests.support.interpreter import interpreted  # noqa: F401
from tests.support.winner_gradients import check, random_winners

pytestmark = [pytest.mark.interpret, pytest.mark.usefixtures("interpreted")]

# Small tiles: the interpreter pays per operation and per element, and several tiles must take part.
TILES = {
    "query_gradient": QueryGradientTiles(4, 64, 4, 1),
    "document_gradient": DocumentGradientTiles(16, 16, 64, 32, 1, 4, 1),
    "candidate_gradient": CandidateGradientTiles(16, 16, 64, 4, 1),
}
RANKS = [1, 2, 4, 7]
# Of four queries, for five documents.
CANDIDATES = {"all": None, "shared": [[4, 1, 1], [1, 0, 4], [3, 3, 3], [1, 2, 4]], "own": [[2], [4], [1], [0]]}


@pytest.fixture(autouse=True)
def _small_tiles(request, monkeypatch):
    if "of_the_table" not in request.node.name:
        choose_tiles(monkeypatch, launch, **TILES)


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)


def batch(generator, lengths, dim, dtype=torch.float32, gapless=False):
    if gapless:
        return TokenBatch.from_list([torch.randn(n, dim, generator=generator).to(dtype) for n in lengths])
    return ragged_batches.ragged(generator, lengths, dim, dtype, integers=False, masked=False)


def batches(generator, dim=16, gapless=False, queries=(4, 20, 0, 5), documents=(2, 40, 0, 19, 70)):
    return [batch(generator, list(lengths), dim, gapless=gapless) for lengths in (queries, documents)]


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("layout", CANDIDATES)
@pytest.mark.parametrize("gapless", [False, True], ids=["gaps", "gapless"])
def test_ranks(generator, layout, gapless, ranks):
    candidates = CANDIDATES[layout]
    candidates = None if candidates is None else torch.tensor(candidates)
    check(generator, *batches(generator, 16 if gapless else 80, gapless), candidates, ranks)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", ["all", "own"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_half(generator, ranks, layout, dtype):
    queries, documents = (batch(generator, lengths, 48, dtype) for lengths in ([4, 7, 1, 3], [20, 3, 35, 9, 1]))
    candidates = None if layout == "all" else torch.tensor(CANDIDATES[layout])
    check(generator, queries, documents, candidates, ranks, 1e-2)


@pytest.mark.parametrize("layout", ["all", "shared"])
def test_tiles_of_the_table(generator, layout):
    candidates = None if layout == "all" else torch.tensor(CANDIDATES[layout])
    check(generator, *batches(generator, 32), candidates, 3)


def test_the_most_winners(generator):
    # More than many documents have tokens, positions behind the 255 that uint8 holds, and more than 32 tiles.
    check(generator, *batches(generator, queries=(1, 9), documents=(2, 40, 0, 530)), None, 64)


@pytest.mark.parametrize("block_t", [16, 32, 64])
def test_sets_of_tokens_in_tiles_of_any_length(generator, monkeypatch, block_t):
    choose_tiles(monkeypatch, launch, document_gradient=TILES["document_gradient"]._replace(block_t=block_t))
    check(generator, *batches(generator), None, 4)


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("entries", [1, 100])
def test_documents_are_bucketed_in_parts(generator, monkeypatch, entries, ranks):
    monkeypatch.setattr(launch, "_BUCKET_ENTRIES", entries)
    check(generator, *batches(generator), None, ranks)


def test_winners_are_sorted_in_chunks_of_few_rows(generator, monkeypatch):
    monkeypatch.setattr(launch, "_WINNERS_AT_ONCE", 32)
    check(generator, *batches(generator), None, 4)


@pytest.mark.parametrize("candidates", [[[2, 0], [1, 3], [5, 4]], [[2, 0], [2, 2], [5, 0]]], ids=["once", "repeated"])
@pytest.mark.parametrize(
    "scanned, longest, gapless",
    [(0, 7, False), (0, 20, True), (2**13, 7, True), (2**13, 20, False)],
    ids=["ordered-short", "ordered-long", "scanned-short", "scanned-long"],
)
def test_no_more_pairs_than_documents(generator, monkeypatch, scanned, candidates, longest, gapless):
    monkeypatch.setattr(launch, "_SCANNED_PAIRS", scanned)
    monkeypatch.setattr(launch, "_BLOCK_SCAN", 4)
    queries, documents = batches(generator, 48, gapless, (4, longest, 1), (20, 3, 35, 0, 16, 9))
    check(generator, queries, documents, torch.tensor(candidates))


@pytest.mark.parametrize("comparisons", [0, 2**26], ids=["sorted", "quadratic"])
def test_candidates_in_the_order_of_documents(generator, monkeypatch, comparisons):
    monkeypatch.setattr(launch, "_QUADRATIC_ORDER", comparisons)
    candidates = torch.tensor(CANDIDATES["shared"])
    check(generator, *batches(generator), candidates)
    pairs, offsets = launch.candidate_order(candidates, 5)
    assert pairs.tolist() == [4, 1, 2, 3, 9, 10, 6, 7, 8, 0, 5, 11] and offsets.tolist() == [0, 1, 5, 6, 9, 12]


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("layout", CANDIDATES)
def test_a_gradient_of_nan_shows(generator, layout, ranks):
    queries, documents = batches(generator, gapless=True)
    candidates = None if layout == "all" else torch.tensor(CANDIDATES[layout])
    winners = random_winners(generator, queries, documents, candidates, ranks)
    grad = torch.full((len(queries), len(winners)), torch.nan)
    operands = ScoringOperands.of(queries, documents, candidates)
    gradients = launch.backward(grad, winners, operands, "highest", True, True)
    assert all(gradient.isnan().any() for gradient in gradients)
