"""The pooling kernels on a GPU at realistic sizes and random shapes, against the definition in float64."""

import random

import pytest
import torch

from pylate_fastmaxsim import LogSumExp, Softmax, TokenBatch, TopK, maxsim, pooled_scores, reference
from tests.support.on_gpu import DEVICE, DTYPES, captured, no_waiting, ragged, random_problem

pytest.importorskip("triton")

from tests.support.pooled_exactness import check, run  # noqa: E402

pytestmark = pytest.mark.cuda

POOLINGS = (Softmax(1.0), Softmax(0.05), LogSumExp(0.1), TopK(2), TopK(4), TopK(7), TopK(64))


def problem(layout, queries, documents, dim=128, dtype=torch.bfloat16, slots=4, keep=None, gap=0):
    """Queries and documents, of each their number and the longest, and for the layout "candidates" some for each query."""
    generator = torch.Generator().manual_seed(dim)
    batches = [ragged(generator, *sizes, dim, dtype, keep=keep, gap=gap) for sizes in (queries, documents)]
    if layout == "all":
        return *batches, None
    return *batches, torch.randint(documents[0], (queries[0], slots), generator=generator).to(DEVICE)


@pytest.mark.parametrize("dim", [1, 48, 128, 200, 768])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["all", "candidates"])
@pytest.mark.parametrize("pooling", [Softmax(0.2), LogSumExp(0.1), TopK(4), TopK(16)], ids=str)
def test_dimensions(dim, dtype, layout, pooling):
    check(*problem(layout, (19, 32), (37, 300), dim, dtype, slots=11, keep=0.8), pooling=pooling)


@pytest.mark.parametrize("precision", ["high", "medium"])
@pytest.mark.parametrize("pooling", [Softmax(0.2), TopK(4)], ids=str)
def test_lower_float32_precision(precision, pooling):
    check(*problem("all", (9, 40), (23, 200), 128, torch.float32), pooling=pooling, precision=precision)


@pytest.mark.parametrize("seed", range(60))
def test_random_shapes(seed):
    draw = random.Random(seed)
    queries, documents, candidates = random_problem(draw, seed)
    check(queries, documents, candidates, pooling=draw.choice(POOLINGS))


@pytest.mark.parametrize("k", [4, 9])
def test_ties_go_to_the_lower_positions(k):
    generator = torch.Generator().manual_seed(0)
    queries, documents = (
        torch.randint(-2, 3, shape, generator=generator).bfloat16().to(DEVICE) for shape in ((8, 32, 16), (9, 300, 16))
    )
    batches = TokenBatch.from_padded(queries), TokenBatch.from_padded(documents)
    check(*batches, pooling=TopK(k), ties=True)


@pytest.mark.parametrize("pooling", POOLINGS, ids=str)
def test_nan_is_in_the_scores_that_use_it(pooling):
    queries, documents = torch.ones(3, 32, 128, device=DEVICE), torch.ones(5, 100, 128, device=DEVICE)
    documents[2, 70, 5] = torch.nan
    for dtype in DTYPES:
        scores = pooled_scores(queries.to(dtype), documents.to(dtype), pooling=pooling)
        assert scores.isnan().tolist() == [[False, False, True, False, False]] * 3


@pytest.mark.parametrize("pooling", [Softmax(0.1), LogSumExp(0.1), TopK(4)], ids=str)
@pytest.mark.parametrize("layout", ["all", "candidates"])
def test_runs_repeat_bit_by_bit(pooling, layout):
    inputs = problem(layout, (64, 32), (128, 300), gap=1)
    grad = torch.randn(64, 128 if layout == "all" else 4, device=DEVICE)
    first = run(*inputs, pooling, grad)
    for _ in range(10):
        again = run(*inputs, pooling, grad)
        assert all(torch.equal(a, b) for a, b in zip((first[0], *first[2:]), (again[0], *again[2:]), strict=True))


@pytest.mark.parametrize("pooling", [Softmax(0.1), TopK(4), TopK(9)], ids=str)
@pytest.mark.parametrize("layout", ["all", "candidates"])
def test_nothing_waits_and_a_cuda_graph_captures_it(pooling, layout):
    queries, documents, candidates = problem(layout, (16, 32), (32, 100), gap=1)
    grad = torch.randn(16, 32 if layout == "all" else 4, device=DEVICE)

    def both():
        scores, _, *gradients = run(queries, documents, candidates, pooling, grad)
        return scores, *gradients

    both()
    with no_waiting():
        both()
    graph, results = captured(both)
    for tensor in (queries.values, documents.values):
        tensor.copy_(torch.randn(tensor.shape, device=DEVICE))
    graph.replay()
    assert all(map(torch.equal, results, both()))


@pytest.mark.parametrize("pooling", [Softmax(0.2), TopK(4), TopK(20)], ids=str)
def test_offsets_beyond_31_bits(pooling):
    # 2.2e9 numbers of documents, of which the last are scored as alone.
    queries = torch.randn(2, 32, 128, device=DEVICE, dtype=torch.bfloat16)
    documents = torch.empty(17_200, 1000, 128, device=DEVICE, dtype=torch.bfloat16).normal_()
    scores = pooled_scores(queries, documents, pooling=pooling)
    last = pooled_scores(queries, documents[-3:].clone(), pooling=pooling)
    assert torch.equal(scores[:, -3:], last)


def test_more_than_the_kernels_keep_and_float64_run_in_blocks(caplog):
    queries, documents = torch.randn(3, 8, 32, device=DEVICE), torch.randn(5, 200, 32, device=DEVICE)
    for dtype, pooling in ((torch.float32, TopK(100)), (torch.float64, Softmax(0.5)), (torch.float64, TopK(3))):
        batches = [TokenBatch.from_padded(values.to(dtype)) for values in (queries, documents)]
        doubles = [batch.with_values(batch.values.double()) for batch in batches]
        scores, exact = pooled_scores(*batches, pooling=pooling), reference.pooled_scores(*doubles, pooling=pooling)
        torch.testing.assert_close(scores.double(), exact, rtol=1e-5, atol=1e-4)
    assert caplog.text.count("TopK(100) is computed in blocks of PyTorch") == 1


def test_memory_is_not_that_of_the_similarities():
    queries = torch.randn(128, 32, 128, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    documents = torch.randn(128, 180, 128, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    for pooling in (Softmax(0.5), TopK(4)):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        pooled_scores(queries, documents, pooling=pooling).sum().backward()
        # All similarities would be 360 MiB of float32.
        assert torch.cuda.max_memory_allocated() - before < 80 * 2**20
        queries.grad = documents.grad = None


@pytest.mark.parametrize("pooling", [Softmax(0.1), TopK(4)], ids=str)
def test_compiled_as_one_graph(pooling):
    queries, documents = (
        torch.randn(*shape, device=DEVICE, requires_grad=True) for shape in ((4, 32, 128), (6, 100, 128))
    )

    def score(q, d):
        return pooled_scores(q, d, pooling=pooling)

    compiled = torch.compile(score, fullgraph=True)
    with torch.autocast(DEVICE, torch.bfloat16):
        ours, expected = (function(queries, documents) for function in (compiled, score))
    assert torch.equal(ours, expected)
    for mine, theirs in zip(
        torch.autograd.grad(ours.sum(), (queries, documents)),
        torch.autograd.grad(expected.sum(), (queries, documents)),
        strict=True,
    ):
        assert torch.equal(mine, theirs)


def test_a_low_temperature_is_nearly_the_maximum():
    queries, documents = torch.randn(4, 8, 64, device=DEVICE), torch.randn(5, 90, 64, device=DEVICE)
    scores = pooled_scores(queries, documents, pooling=LogSumExp(1e-4))
    torch.testing.assert_close(scores, maxsim(queries, documents), rtol=1e-4, atol=1e-2)
