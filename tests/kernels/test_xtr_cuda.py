"""XTR scores on a GPU at realistic sizes, against the definition in float64 and against PyLate."""

from dataclasses import replace

import pytest
import torch
from pylate.scores import XTRKDScores, XTRScores

from pylate_fastmaxsim import TokenBatch, xtr_scores
from pylate_fastmaxsim._operands import ScoringOperands
from tests.support.exactness import from_winners, relative_error, row_queries, winner_index
from tests.support.on_gpu import DEVICE, DTYPES, captured, no_waiting, ragged

pytest.importorskip("triton")

from pylate_fastmaxsim.kernels.winner_backward import launch as winner_backward  # noqa: E402
from pylate_fastmaxsim.kernels.xtr import launch as xtr_launch  # noqa: E402

pytestmark = pytest.mark.cuda


def run(queries, documents, k, candidates=None, zero_floor=None, precision="highest", normalizer="positive"):
    """Scores, winners, and both gradients of their sum."""
    operands = ScoringOperands.of(queries, documents, candidates, zero_floor)
    sums, counts, winners = xtr_launch.forward(operands, k, normalizer == "retrieved", True, precision)
    weights = 1 / counts.clamp(min=1e-3)
    grads = winner_backward.backward(weights, winners, operands, precision, True, True)
    return sums * weights, winners, *grads


def problem(queries, documents, dim=128, dtype=torch.bfloat16, keep=None):
    """Queries and documents, of each their number and the longest."""
    generator = torch.Generator().manual_seed(dim)
    return [ragged(generator, *sizes, dim, dtype, keep=keep) for sizes in (queries, documents)]


def live_rows(batch):
    rows = row_queries(batch)
    return (rows >= 0) if batch.keep is None else (rows >= 0) & batch.keep


def exact_maxima(queries, documents, k):
    """For every query row the k-th largest similarity in float64, and the largest of every document, ``[Nd, Tq]``."""
    live = live_rows(documents)
    similarities = queries.values.double() @ documents.values[live].double().t()
    threshold = similarities.topk(k).values[:, -1] if k <= similarities.shape[1] else torch.tensor(-torch.inf)
    maxima = torch.full((len(documents), len(queries.values)), -torch.inf, dtype=torch.float64, device=DEVICE)
    owner = row_queries(documents)[live]
    maxima.index_reduce_(0, owner, similarities.t().contiguous(), "amax")
    return threshold, maxima


def check(queries, documents, k, candidates=None, precision="highest", tolerance=1e-5, normalizer="positive"):
    scores, winners, *grads = run(queries, documents, k, candidates, precision=precision, normalizer=normalizer)
    retrieved = normalizer == "retrieved"
    alone = xtr_launch.forward(ScoringOperands.of(queries, documents, candidates), k, retrieved, False, precision)
    assert torch.equal(alone[0] * (1 / alone[1].clamp(min=1e-3)), scores), "scores without winners"
    threshold, maxima = exact_maxima(queries, documents, k)
    rows = live_rows(queries)
    if candidates is not None:
        maxima = maxima[candidates[row_queries(queries).clamp(min=0)].t(), torch.arange(len(rows), device=DEVICE)]
    won = winner_index(winners) >= 0
    assert not won[:, ~rows].any()
    # Similarities that are 0 or at the threshold up to rounding may fall to either side.
    clear = ((maxima - threshold).abs() > tolerance) & (maxima.abs() > tolerance) & rows
    counted = maxima.isfinite() if retrieved else maxima > 0
    clear &= counted
    assert torch.equal(won & clear, (maxima >= threshold) & clear)
    ones = torch.ones_like(scores)
    sums, _, _ = from_winners(queries, documents, candidates, winners, ones)
    counts = torch.zeros_like(sums).index_add_(0, row_queries(queries)[rows], (won & counted).t()[rows].double())
    weights = 1 / counts.clamp(min=1e-3)
    assert relative_error(scores, sums * weights) < tolerance
    _, grad_q, grad_d = from_winners(queries, documents, candidates, winners, weights)
    rounding = 2e-3 if queries.values.dtype != torch.float32 else max(tolerance, 2e-5)
    assert relative_error(grads[0], grad_q) < rounding and relative_error(grads[1], grad_d) < rounding
    if candidates is None:
        best = torch.where(won, maxima, 0)
        assert abs(sums.sum() - best.sum()) <= tolerance * best.abs().sum(), "winners are not the best tokens"
    return winners


@pytest.mark.parametrize("dim", [7, 48, 96, 128, 200, 256, 768])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["all", "candidates"])
def test_dimensions(dim, dtype, layout):
    candidates = torch.randint(70, (19, 11), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    batches = problem((19, 32), (70, 300), dim, dtype, keep=0.8)
    check(*batches, 100, candidates if layout == "candidates" else None)


@pytest.mark.parametrize("precision, tolerance", [("high", 1e-4), ("medium", 4e-3)])
def test_lower_float32_precision(precision, tolerance):
    check(*problem((9, 40), (64, 200), dtype=torch.float32), 200, precision=precision, tolerance=tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [96, 128, 768])
def test_the_kth_largest_is_one_of_the_maxima_bit_by_bit(dtype, dim):
    """Threshold and maxima come from different kernels; if one rounded otherwise, rows would have no winner."""
    generator = torch.Generator().manual_seed(dim)
    queries, documents = ragged(generator, 64, 32, dim, dtype, shortest=32), ragged(generator, 128, 180, dim, dtype)
    winners = winner_index(run(queries, documents, 1)[1])
    assert ((winners >= 0).sum(dim=0) == 1).all()


@pytest.mark.parametrize("k", [1, 16, 256, 3000, 100_000])
@pytest.mark.parametrize("normalizer", ["positive", "retrieved"])
def test_numbers_of_passing_tokens(k, normalizer):
    check(*problem((64, 32), (128, 180)), k, normalizer=normalizer)


@pytest.mark.parametrize("seed", range(24))
def test_random_shapes(seed):
    generator = torch.Generator().manual_seed(seed)

    def pick(*options):
        return options[int(torch.randint(len(options), (1,), generator=generator))]

    dtype, dim = pick(*DTYPES), pick(32, 96, 128)
    queries = ragged(
        generator, pick(1, 3, 50), pick(1, 5, 32, 33, 128, 300), dim, dtype, pick(None, 0.8), pick(0, 1), 2
    )
    documents = ragged(
        generator, pick(1, 2, 65), pick(1, 7, 63, 65, 256, 2000), dim, dtype, pick(None, 0.7, 0.05), pick(0, 1), 3
    )
    candidates = torch.randint(len(documents), (len(queries), pick(1, 7, 40)), generator=generator).to(DEVICE)
    check(queries, documents, pick(1, 10, 256), pick(None, candidates), normalizer=pick("positive", "retrieved"))


@pytest.mark.parametrize("rounds", [0, 1, 2])
def test_similarities_in_clusters(monkeypatch, rounds):
    """Tokens of a document that are nearly alike: many more exceed the first bound than there are places for."""
    for name, value in (("_PLACES", 0), ("_PLACES_OF_K", 2), ("_ROUNDS", rounds)):
        monkeypatch.setattr(xtr_launch, name, value)
    generator = torch.Generator().manual_seed(0)
    centers = torch.randn(128, 1, 128, generator=generator)
    values = centers + 0.3 * torch.randn(128, 180, 128, generator=generator)
    documents = TokenBatch.from_padded(torch.nn.functional.normalize(values, dim=-1).to(DEVICE, torch.bfloat16))
    check(ragged(generator, 40, 32, 128, torch.bfloat16), documents, 256)


@pytest.mark.parametrize("scratch", [2**18, 2**22])
def test_rows_in_parts(monkeypatch, scratch):
    queries, documents = problem((99, 32), (65, 180), keep=0.9)
    whole = run(queries, documents, 50)
    monkeypatch.setattr(xtr_launch, "_SCRATCH_BYTES", scratch)
    assert all(map(torch.equal, whole, run(queries, documents, 50)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_runs_repeat_bit_by_bit(dtype):
    queries, documents = problem((64, 32), (128, 300), 128, dtype)
    first = run(queries, documents, 256)
    for _ in range(20):
        assert all(map(torch.equal, first, run(queries, documents, 256)))


def test_nothing_waits_for_the_device():
    queries, documents = problem((16, 100), (32, 100), keep=0.9)
    run(queries, documents, 64)
    with no_waiting():
        run(queries, documents, 64)


def test_a_cuda_graph_captures_it():
    queries, documents = problem((16, 100), (32, 100), keep=0.9)
    documents = replace(documents, gapless=False)  # its lengths change below
    graph, results = captured(lambda: run(queries, documents, 64))
    documents.values.copy_(torch.randn(documents.values.shape, device=DEVICE))
    documents.lengths.sub_(documents.lengths // 2)
    graph.replay()
    assert all(map(torch.equal, results, run(queries, documents, 64)))


@pytest.mark.parametrize("metric", [XTRScores, XTRKDScores])
@pytest.mark.parametrize("masked", [False, True])
def test_same_as_pylate(metric, masked):
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(16, 32, 128, generator=generator).to(DEVICE)
    documents = torch.randn(16, 4, 100, 128, generator=generator).to(DEVICE)
    queries, documents = (torch.nn.functional.normalize(each, dim=-1).requires_grad_() for each in (queries, documents))
    mask = torch.rand(16, 4, 100, generator=generator).to(DEVICE) < 0.9 if masked else None
    stock = metric(k=256)(queries, documents, documents_mask=mask)
    ours = xtr_scores(
        queries,
        documents.flatten(0, 1),
        256,
        torch.arange(64, device=DEVICE).view(16, 4) if metric is XTRKDScores else None,
        documents_mask=None if mask is None else mask.flatten(0, 1),
        zero_floor=None if mask is None else ~mask.flatten(0, 1).all(dim=1),
    )
    weights = torch.randn(stock.shape, generator=generator).to(DEVICE)
    grads = [torch.autograd.grad((scores * weights).sum(), (queries, documents)) for scores in (stock, ours)]
    assert relative_error(ours, stock.double()) < 1e-5
    for wanted, gradient in zip(*grads, strict=True):
        assert relative_error(gradient, wanted.double()) < 1e-5
