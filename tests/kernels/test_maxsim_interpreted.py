"""Kernels run on a CPU through Triton's interpreter, against the definition in float64. Run with TRITON_INTERPRET=1."""

import pytest
import torch

from tests.support.defined_winners import maxsim_winners

pytest.importorskip("triton")

from pylate_fastmaxsim import TokenBatch
from pylate_fastmaxsim._operands import ScoringOperands
from pylate_fastmaxsim.kernels.maxsim import launch as scores
from pylate_fastmaxsim.kernels.maxsim import tiles as forward_tiles
from pylate_fastmaxsim.kernels.winner_backward import launch as gradients
from pylate_fastmaxsim.kernels.winner_backward import tiles as backward_tiles
from tests.support import exactness, maxsim_kernels
from tests.support.chosen_tiles import choose_tiles
from tests.support.exactness import winner_index
from tests.support.interpreter import interpreted, spread_out  # noqa: F401

pytestmark = [pytest.mark.interpret, pytest.mark.usefixtures("interpreted")]

# Small tiles: the interpreter pays per operation and per element, and several tiles must take part.
FORWARD = forward_tiles.ForwardTiles(16, 32, 64, 3, 4, 1)
BACKWARD = {
    "query_gradient": backward_tiles.QueryGradientTiles(4, 64, 2, 1),
    "document_gradient": backward_tiles.DocumentGradientTiles(16, 16, 64, 32, 1, 4, 1),
    "candidate_gradient": backward_tiles.CandidateGradientTiles(16, 16, 64, 4, 1),
}


@pytest.fixture(autouse=True)
def _small_tiles(request, monkeypatch):
    if "of_the_table" not in request.node.name:
        choose_tiles(monkeypatch, scores, forward=FORWARD)
        choose_tiles(monkeypatch, gradients, **BACKWARD)


@pytest.fixture(autouse=True)
def _several_documents_a_program(monkeypatch):
    # So few rows would otherwise leave one document to each program.
    monkeypatch.setattr(forward_tiles, "_ENOUGH_ROWS", 0)


def ragged(generator, lengths, dim, dtype=torch.float32, keep=None, gap=1):
    """Sequences of the given lengths in shuffled order, each with ``gap`` (0 or 1) unused rows of NaN behind it."""
    lengths = torch.tensor(lengths, dtype=torch.int64)
    order = torch.randperm(len(lengths), generator=generator)
    starts = torch.empty_like(lengths)
    ends = (lengths[order] + gap).cumsum(0)
    starts[order] = ends - lengths[order] - gap
    values = torch.randn(int(lengths.sum()) + gap * len(lengths), dim, generator=generator)
    if gap:
        values[ends - 1] = torch.nan
    mask = None if keep is None else torch.rand(len(values), generator=generator) < keep
    return TokenBatch(values.to(dtype), starts, lengths, max([0, *lengths.tolist()]), mask, gapless=gap == 0)


def check(queries, documents, candidates=None, zero_floor=None):
    tolerance = 1e-5 if queries.values.dtype == torch.float32 else 1e-2
    problem = queries, documents, candidates, zero_floor
    scores, winners = exactness.check(maxsim_kernels, *problem, tolerance=tolerance)
    in_double = [batch.with_values(batch.values.double()) for batch in (queries, documents)]
    assert torch.equal(winner_index(winners), maxsim_winners(*in_double, candidates, zero_floor))
    return scores, winners


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)


@pytest.mark.parametrize(
    "dim, layout, gap",
    [(1, "all", 1), (7, "candidates", 0), (48, "all", 0), (128, "all", 1), (200, "candidates", 1)],
)
def test_ragged(generator, dim, layout, gap):
    queries = ragged(generator, [5, 0, 3, 1, 8, 2], dim, keep=0.8, gap=gap)
    documents = ragged(generator, [1, 40, 0, 17, 33], dim, keep=0.6, gap=gap)
    candidates = torch.tensor([[4, 4, 1], [0, 1, 2], [3, 0, 3], [2, 2, 2], [1, 3, 4], [0, 4, 1]])
    check(queries, documents, candidates if layout == "candidates" else None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", ["all", "candidates"])
def test_half(generator, dtype, layout):
    queries = ragged(generator, [4, 7, 1], 48, dtype)
    documents = ragged(generator, [20, 3, 35], 48, dtype)
    check(queries, documents, torch.tensor([[2, 0], [1, 2], [0, 0]]) if layout == "candidates" else None)


@pytest.mark.parametrize("layout, dim", [("all", 80), ("candidates", 16)])
def test_queries_longer_than_a_tile(generator, layout, dim):
    queries = ragged(generator, [37, 2, 130], dim, keep=0.9)
    documents = ragged(generator, [18, 5], dim)
    check(queries, documents, torch.tensor([[1, 0], [0, 0], [1, 1]]) if layout == "candidates" else None)


def test_tiles_of_the_table(generator):
    queries = ragged(generator, [3, 40, 130], 32)
    check(queries, ragged(generator, [70, 1], 32))
    check(ragged(generator, [3, 1], 32), ragged(generator, [70, 1], 32))


@pytest.mark.parametrize("lengths", [[255, 2], [256, 300]])
def test_winner_types(generator, lengths):
    _, winners = check(ragged(generator, [3, 2], 16), ragged(generator, lengths, 16))
    assert winners.dtype == (torch.uint8 if max(lengths) <= 255 else torch.int16)


@pytest.mark.parametrize("layout, keep", [("all", None), ("candidates", 0.7)], ids=["all", "candidates masked"])
def test_strided_tensors(generator, layout, keep):
    batches = ragged(generator, [4, 7, 1], 48, keep=keep), ragged(generator, [20, 3, 35], 48, keep=keep)
    candidates = torch.tensor([[2, 0], [1, 2], [0, 0]]) if layout == "candidates" else None
    zero_floor = torch.tensor([False, True, True])
    operands = ScoringOperands.of(*batches, candidates, zero_floor)
    strided = ScoringOperands(*(spread_out(x) if isinstance(x, torch.Tensor) else x for x in operands))
    scores, winners = maxsim_kernels.forward(operands, True, "highest")
    own_scores, own_winners = maxsim_kernels.forward(strided, True, "highest")
    assert torch.equal(own_scores, scores)
    assert torch.equal(winner_index(own_winners), winner_index(winners))
    for grad in (torch.randn(scores.shape, generator=generator), torch.ones(1, 1).expand(scores.shape)):
        expected = maxsim_kernels.backward(grad.contiguous(), winners, operands, "highest", True, True)
        if grad.is_contiguous():
            grad = spread_out(grad)
        actual = maxsim_kernels.backward(grad, winners, strided, "highest", True, True)
        assert all(map(torch.equal, actual, expected))


def test_everything_masked(generator):
    queries = ragged(generator, [4, 2], 16)
    documents = ragged(generator, [20, 3], 16, keep=0.0)
    scores, winners = check(queries, documents)
    assert not scores.any() and (winners == 255).all()
    check(ragged(generator, [4, 2], 16, keep=0.0), ragged(generator, [20, 3], 16))


@pytest.mark.parametrize("layout", ["all", "candidates"])
def test_zero_floor(generator, layout):
    queries = ragged(generator, [6, 3], 2)
    documents = ragged(generator, [1, 1, 1, 20, 0], 2)
    candidates = torch.tensor([[3, 0, 1, 2, 4], [1, 1, 0, 2, 3]]) if layout == "candidates" else None
    floored, _ = check(queries, documents, candidates, torch.tensor([True, True, False, False, True]))
    plain, _ = check(queries, documents, candidates)
    if candidates is None:
        assert (floored != plain).any(dim=0).tolist() == [True, True, False, False, False]


@pytest.mark.parametrize("width, layout", [(32, "all"), (64, "candidates"), (128, "all")])
def test_the_first_of_equal_maxima_wins_in_tiles_of_any_width(generator, monkeypatch, width, layout):
    choose_tiles(monkeypatch, scores, forward=FORWARD._replace(block_n=width))
    queries = ragged(generator, [7, 3], 16)
    documents = ragged(generator, [300, 1, 5, width, 2 * width + 1], 16, gap=0)
    # Few different tokens, so that each maximum occurs again and again, in the same column modulo 8 and in others.
    documents.values[:] = documents.values[torch.randint(24, (len(documents.values),), generator=generator)]
    candidates = torch.tensor([[4, 0, 1], [3, 2, 0]]) if layout == "candidates" else None
    check(queries, documents, candidates, torch.tensor([False, True, False, True, False]))
    keep = torch.rand(len(documents.values), generator=generator) < 0.7
    masked = TokenBatch(documents.values, documents.starts, documents.lengths, 300, keep, gapless=True)
    check(queries, masked, candidates, None)

    documents.values[torch.rand(len(keep), generator=generator) < 0.05] = float("nan")
    # Behind documents in which later tokens won, some in which all similarities are -infinity.
    queries.values.abs_()
    for short in (1, 2):
        start = int(documents.starts[short])
        documents.values[start : start + int(documents.lengths[short])] = -torch.inf
    operands = ScoringOperands.of(queries, documents, candidates, None)
    _, winners = maxsim_kernels.forward(operands, True, "highest")
    assert torch.equal(winner_index(winners), maxsim_winners(queries, documents, candidates))


def test_nan_shows_and_stays_where_it_is_used(generator):
    queries, documents = ragged(generator, [3, 2, 0], 16, gap=0), ragged(generator, [20, 40, 5], 16, gap=0)
    nan = documents.starts[1] + torch.tensor([30, 35])
    documents.values[nan] = torch.nan
    scores, winners = maxsim_kernels.forward(ScoringOperands.of(queries, documents), True, "highest")
    assert scores.isnan().tolist() == [[False, True, False]] * 2 + [[False] * 3]
    assert torch.equal(winners.long(), maxsim_winners(queries, documents))
    keep = torch.ones(65, dtype=torch.bool)
    keep[nan] = False
    masked = TokenBatch(documents.values, documents.starts, documents.lengths, 40, keep)
    assert not maxsim_kernels.forward(ScoringOperands.of(queries, masked), True, "highest")[0].isnan().any()
    queries.values[queries.starts[0] + 1] = torch.nan
    scores, _ = maxsim_kernels.forward(ScoringOperands.of(queries, masked), True, "highest")
    assert scores.isnan().tolist() == [[True] * 3, [False] * 3, [False] * 3]


@pytest.mark.parametrize("q_lengths, d_lengths, slots", [([], [3], None), ([2], [], None), ([0], [0], None), ([2], [3], 0)])  # fmt: skip
def test_empty(generator, q_lengths, d_lengths, slots):
    queries, documents = ragged(generator, q_lengths, 16), ragged(generator, d_lengths, 16)
    candidates = None if slots is None else torch.zeros(len(q_lengths), slots, dtype=torch.int64)
    operands = ScoringOperands.of(queries, documents, candidates, None)
    scores, winners = maxsim_kernels.forward(operands, True, "highest")
    assert scores.shape == (len(q_lengths), len(d_lengths) if slots is None else slots) and not scores.any()
    assert winners.shape == (scores.shape[1], len(queries.values))
    grad_q, grad_d = maxsim_kernels.backward(scores, winners, operands, "highest", True, True)
    assert grad_q.shape == queries.values.shape and not grad_q.any()
    assert grad_d.shape == documents.values.shape and not grad_d.any()
