"""The kernels of compressed documents on a GPU at realistic sizes, against the definition in float64."""

import random

import pytest
import torch

from pylate_fastmaxsim import TokenBatch, maxsim
from tests.support.on_gpu import DEVICE, DTYPES, captured, no_waiting, ragged, random_problem

pytest.importorskip("triton")

from pylate_fastmaxsim.compressed import rounded_queries  # noqa: E402
from pylate_fastmaxsim.kernels.compressed import launch  # noqa: E402
from tests.support.compressed_exactness import FORMATS, check, compressed_as  # noqa: E402

pytestmark = pytest.mark.cuda


def problem(format, queries, documents, dim=128, dtype=torch.bfloat16, slots=0, keep=None):
    """Queries and documents, of each their number and the longest; with slots also candidates of each query."""
    generator = torch.Generator().manual_seed(dim)
    q, d = (ragged(generator, *sizes, dim, dtype, keep=keep, gap=keep is not None) for sizes in (queries, documents))
    candidates = None
    if slots:
        candidates = torch.randint(documents[0], (queries[0], slots), generator=generator).to(DEVICE)
    return q, compressed_as(d, format), candidates


@pytest.mark.parametrize("dim", [8, 48, 128, 200, 256, 768])
@pytest.mark.parametrize("slots", [0, 11], ids=["all", "candidates"])
@pytest.mark.parametrize("format", FORMATS)
def test_dimensions(format, slots, dim):
    check(*problem(format, (19, 32), (37, 300), dim, slots=slots, keep=0.8))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("queries", [(1, 32), (3, 32), (70, 32), (9, 130)], ids=str)
@pytest.mark.parametrize("format", FORMATS)
def test_numbers_of_query_rows(format, queries, dtype):
    """Each has other tiles; residual codes are decompressed in the kernel or before it."""
    check(*problem(format, queries, (333, 180), dtype=dtype))


@pytest.mark.parametrize("slots", [0, 6], ids=["all", "candidates"])
def test_e4m3_without_hardware(slots, monkeypatch):
    monkeypatch.setattr(launch, "has_fp8", lambda device: False)
    check(*problem("fp8", (19, 32), (37, 300), slots=slots, keep=0.8), tolerance=1e-5)


@pytest.mark.parametrize("seed", range(40))
def test_random_shapes(seed):
    draw = random.Random(seed)
    queries, documents, candidates = random_problem(draw, seed)
    check(queries, compressed_as(documents, draw.choice(FORMATS)), candidates)


@pytest.mark.parametrize("format", ["int8", "fp8"])
def test_queries_are_rounded_as_on_a_cpu(format):
    values = torch.randn(3000, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    values[3] = 0
    values[5, 6], values[7, 8] = torch.nan, torch.inf
    rounded, scales = rounded_queries(values, format)
    for actual in (launch.round_rows(values.to(DEVICE), rounded.dtype), rounded_queries(values.to(DEVICE), format)):
        torch.testing.assert_close(actual[1].cpu(), scales, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(actual[0].cpu().float(), rounded.float())


@pytest.mark.parametrize("format", FORMATS)
def test_repeatable_without_waiting_and_in_a_graph(format):
    queries, documents, candidates = problem(format, (70, 32), (500, 180), slots=20, keep=0.9)
    for chosen in (None, candidates):

        def run(chosen=chosen):
            values = queries.values.clone().requires_grad_()
            scores = maxsim(queries.with_values(values), documents, chosen)
            return scores, torch.autograd.grad(scores.square().sum(), values)[0]

        expected = run()
        with no_waiting():
            again = run()
        graph, replayed = captured(run)
        graph.replay()
        assert all(map(torch.equal, again, expected)) and all(map(torch.equal, replayed, expected))


@pytest.mark.parametrize("format", FORMATS)
def test_a_query_token_that_is_not_finite_gives_nan(format):
    queries, documents, _ = problem(format, (5, 32), (40, 100))
    queries.values[queries.starts[2], 4] = torch.nan
    scores = maxsim(queries, documents)
    assert scores[2].isnan().all() and scores[[0, 1, 3, 4]].isfinite().all()


def test_offsets_past_two_to_the_31():
    """More numbers than 32 bits can count."""
    tokens = 2**24 + 1000
    values = torch.zeros(tokens, 128, dtype=torch.bfloat16, device=DEVICE)
    values[-300:] = torch.nn.functional.normalize(torch.randn(300, 128, device=DEVICE), dim=1).bfloat16()
    starts = torch.tensor([0, tokens - 300], device=DEVICE)
    lengths = torch.tensor([300, 300], device=DEVICE)
    queries = TokenBatch.from_padded(values[-32:][None].clone())
    for format in ("int8", "fp8", "residual 4"):
        documents = compressed_as(TokenBatch(values, starts, lengths, 300), format)
        last = compressed_as(TokenBatch.from_padded(values[-300:][None].clone()), format)
        assert torch.equal(maxsim(queries, documents)[:, 1:], maxsim(queries, last))


def test_saved_documents_in_int8():
    """Only the gradient of the queries changes, by the rounding."""
    generator = torch.Generator().manual_seed(0)
    batches = [ragged(generator, *sizes, 128, torch.bfloat16, keep=0.9) for sizes in ((33, 32), (70, 180))]
    results = []
    for save in (None, "int8"):
        vectors = [batch.values.clone().requires_grad_() for batch in batches]
        scores = maxsim(*(b.with_values(v) for b, v in zip(batches, vectors, strict=True)), save_documents=save)
        results.append((scores.detach(), *torch.autograd.grad(scores.square().sum(), vectors)))
    (scores, grad_q, grad_d), (own_scores, own_q, own_d) = results
    assert torch.equal(own_scores, scores) and torch.equal(own_d, grad_d)
    assert 0 < (own_q - grad_q).norm() < 1e-2 * grad_q.norm()
