"""The kernels of XTR scores on a CPU through Triton's interpreter, against the definition in float64. Run with TRITON_INTERPRET=1."""

from dataclasses import replace

import pytest
import torch

from tests.support.defined_winners import xtr_winners

pytest.importorskip("triton")

from pylate_fastmaxsim import TokenBatch, reference
from pylate_fastmaxsim._operands import ScoringOperands
from pylate_fastmaxsim.cpu import xtr as blocked
from pylate_fastmaxsim.kernels.maxsim.tiles import ForwardTiles
from pylate_fastmaxsim.kernels.xtr import launch as xtr_launch
from pylate_fastmaxsim.kernels.xtr.launch import CollectTiles
from tests.support.chosen_tiles import choose_tiles
from tests.support.exactness import winner_index
from tests.support.interpreter import interpreted, spread_out  # noqa: F401
from tests.support.ragged_batches import ragged

pytestmark = [pytest.mark.interpret, pytest.mark.usefixtures("interpreted")]

# Small tiles: the interpreter pays per operation and per element, and several tiles must take part.
TILES = {"maxima": ForwardTiles(16, 32, 64, 2, 4, 1), "collect": CollectTiles(16, 16, 4, 1)}


@pytest.fixture(autouse=True)
def _small_tiles(request, monkeypatch):
    if "of_the_table" not in request.node.name:
        choose_tiles(monkeypatch, xtr_launch, **TILES)


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)


def batch(generator, lengths, dim, dtype=torch.float32, integers=False, masked=True):
    return ragged(generator, lengths, dim, dtype, integers, masked)


def arguments(queries, documents, k, candidates=None, zero_floor=None, normalizer="positive"):
    return ScoringOperands.of(queries, documents, candidates, zero_floor), k, normalizer == "retrieved"


def check(queries, documents, k, candidates=None, zero_floor=None, normalizer="positive"):
    args = arguments(queries, documents, k, candidates, zero_floor, normalizer)
    sums, counts, winners = xtr_launch.forward(*args, True, "highest")
    q64, d64 = (each.with_values(each.values.double()) for each in (queries, documents))
    rest = k, candidates, zero_floor, normalizer
    assert torch.equal(winner_index(winners), xtr_winners(q64, d64, *rest))
    exact = reference.xtr_scores(q64, d64, *rest)
    torch.testing.assert_close((sums / counts.clamp(min=1e-3)).double(), exact, rtol=1e-5, atol=1e-4)
    return counts, winners


@pytest.mark.parametrize(
    "dim, k, layout",
    [(1, 5, "all"), (48, 1, "candidates"), (128, 30, "all"), (7, 30, "candidates"), (48, 5000, "all")],
)
def test_ragged(generator, dim, k, layout):
    queries = batch(generator, [5, 0, 3, 1, 2, 17], dim)
    documents = batch(generator, [1, 40, 0, 17, 33, 5], dim)
    candidates = torch.tensor([[4, 4, 1], [0, 1, 2], [3, 0, 3], [2, 2, 2], [1, 3, 4], [0, 4, 5]])
    zero_floor = torch.tensor([True, False, False, True, False, False])
    candidates = candidates if layout == "candidates" else None
    check(queries, documents, k, candidates, zero_floor)
    check(queries, documents, k, candidates, normalizer="retrieved")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half(generator, dtype):
    queries = batch(generator, [4, 17, 1], 48, dtype, masked=False)
    documents = batch(generator, [20, 3, 35, 18], 48, dtype)
    check(queries, documents, 12)


@pytest.mark.parametrize(
    "constants, dtype, layout, masked",
    [
        ({}, torch.float32, "candidates", True),
        ({"_SCRATCH_BYTES": 1}, torch.bfloat16, "all", True),
        ({"_PLACES_OF_K": 1, "_PLACES": 0, "_ROUNDS": 0}, torch.float32, "all", False),
    ],
    ids=["at once", "rows in parts", "by bisection"],
)
def test_without_winners(generator, monkeypatch, constants, dtype, layout, masked):
    for name, value in constants.items():
        monkeypatch.setattr(xtr_launch, name, value)
    queries = batch(generator, [2, 0, 3], 8, dtype, masked=masked)
    documents = batch(generator, [1, 20, 0, 7], 8, dtype, masked=masked)
    candidates = torch.tensor([[3, 1], [0, 1], [1, 1]]) if layout == "candidates" else None
    args = arguments(queries, documents, 5, candidates, torch.tensor([True, False, False, True]))
    sums, counts, winners = xtr_launch.forward(*args, False, "highest")
    expected = xtr_launch.forward(*args, True, "highest")
    assert torch.equal(sums, expected[0]) and torch.equal(counts, expected[1]) and winners.numel() == 0


def test_tiles_of_the_table(generator):
    check(batch(generator, [3, 5], 32), batch(generator, [70, 1, 90], 32), 20)


@pytest.mark.parametrize("places, rounds, integers", [(1, 0, True), (1, 1, False), (1, 2, True), (2, 3, False)])
def test_more_candidates_than_places(generator, monkeypatch, integers, places, rounds):
    """Further rounds and bisection find the same as one round."""
    for name, value in (("_PLACES_OF_K", places), ("_PLACES", 0), ("_ROUNDS", rounds)):
        monkeypatch.setattr(xtr_launch, name, value)
    queries = batch(generator, [3, 2], 8, integers=integers)
    documents = batch(generator, [40, 3, 34], 8, integers=integers)
    for k in (1, 9):
        check(queries, documents, k)


def test_bisection_takes_what_is_left(generator, monkeypatch):
    """Without it the thresholds of these rows stay unset, and everything passes."""
    monkeypatch.setattr(xtr_launch, "_ROUNDS", 0)
    queries, documents = batch(generator, [3], 8, masked=False), batch(generator, [5] * 6, 8)
    check(queries, documents, 4)
    monkeypatch.setattr(xtr_launch, "bisect_kernel", type("", (), {"__getitem__": lambda *_: lambda *_, **__: None})())
    with pytest.raises(AssertionError):
        check(queries, documents, 4)


def test_rows_in_parts(generator, monkeypatch):
    monkeypatch.setattr(xtr_launch, "_SCRATCH_BYTES", 1)
    check(batch(generator, [5, 20, 0, 3], 8), batch(generator, [40, 3, 19], 8), 11)


def test_less_positive_tokens_than_pass(generator):
    """Then documents of negative maxima take part, unless one of their tokens does not pass."""
    queries, documents = batch(generator, [2, 3], 2), batch(generator, [1, 2, 1, 3, 12, 2, 1], 2, masked=False)
    for k in (14, 20):
        check(queries, documents, k)
        check(queries, documents, k, zero_floor=torch.arange(7) % 2 == 0)
        check(queries, documents, k, normalizer="retrieved")


def test_everything_masked(generator):
    queries, documents = batch(generator, [4, 2], 16), batch(generator, [20, 3], 16, masked=False)
    counts, winners = check(queries, replace(documents, keep=torch.zeros(len(documents.values), dtype=torch.bool)), 3)
    assert not counts.any() and (winners == 255).all()


@pytest.mark.parametrize("k, normalizer", [(1, "retrieved"), (2, "positive"), (40, "retrieved")])
def test_nan_shows_and_takes_a_place(generator, k, normalizer):
    queries = TokenBatch.from_padded(torch.randn(2, 3, 16, generator=generator))
    documents = torch.randn(3, 9, 16, generator=generator)
    documents[1, 2], documents[1, 7] = torch.nan, torch.nan
    for values in (documents, torch.cat([documents[:1], torch.full((2, 9, 16), torch.nan)])):
        args = arguments(queries, TokenBatch.from_padded(values), k, normalizer=normalizer)
        for ours, wanted in zip(
            xtr_launch.forward(*args, True, "highest"), blocked.forward(*args, True, "highest"), strict=True
        ):
            torch.testing.assert_close(ours, wanted, equal_nan=True)


def test_large_and_zero_similarities(generator):
    queries = TokenBatch.from_padded(torch.tensor([[[1.0], [-1.0], [0.0]]]))
    documents = TokenBatch.from_padded(torch.tensor([1e38, -1e38, 0.0, -0.0, 1.0, -1.0]).view(3, 2, 1))
    for k in (1, 2, 3, 4, 5):
        check(queries, documents, k)


@pytest.mark.parametrize("layout, masked", [("all", False), ("candidates", True)])
def test_strided_tensors(generator, layout, masked):
    batches = batch(generator, [4, 7, 1], 48, masked=masked), batch(generator, [20, 3, 35], 48, masked=masked)
    candidates = torch.tensor([[2, 0], [1, 2], [0, 0]]) if layout == "candidates" else None
    inputs = arguments(*batches, 9, candidates, torch.tensor([False, True, True]))
    strided = ScoringOperands(*(spread_out(x) if isinstance(x, torch.Tensor) else x for x in inputs[0])), *inputs[1:]
    expected, actual = (xtr_launch.forward(*each, True, "highest") for each in (inputs, strided))
    assert all(map(torch.equal, actual, expected))


@pytest.mark.parametrize("q_lengths, d_lengths, slots", [([], [3], None), ([2], [], None), ([0], [0], None), ([2], [3], 0)])  # fmt: skip
def test_empty(generator, q_lengths, d_lengths, slots):
    queries, documents = batch(generator, q_lengths, 16), batch(generator, d_lengths, 16)
    candidates = None if slots is None else torch.zeros(len(q_lengths), slots, dtype=torch.int64)
    args = arguments(queries, documents, 2, candidates)
    sums, counts, winners = xtr_launch.forward(*args, True, "highest")
    assert sums.shape == counts.shape == (len(q_lengths), len(d_lengths) if slots is None else slots)
    assert not sums.any() and winners.shape == (sums.shape[1], len(queries.values))
