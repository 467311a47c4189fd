"""The kernels on a GPU at realistic sizes, against the definition in float64."""

from functools import partial

import pytest
import torch

from pylate_fastmaxsim import TokenBatch, maxsim
from tests.support import exactness, random_shapes
from tests.support.exactness import exact_scores, from_winners, relative_error, winner_index
from tests.support.on_gpu import DEVICE, DTYPES, captured, no_waiting, ragged

pytest.importorskip("triton")

from pylate_fastmaxsim.kernels.winner_backward import launch as winner_backward  # noqa: E402
from tests.support import maxsim_kernels  # noqa: E402

pytestmark = pytest.mark.cuda


run = partial(exactness.run, maxsim_kernels)
check = partial(exactness.check, maxsim_kernels)


def problem(layout, queries, documents, dim=128, dtype=torch.bfloat16, slots=4, keep=None, gap=0):
    """Queries and documents, of each their number and the longest, and for the layout "candidates" some for each query."""
    generator = torch.Generator().manual_seed(dim)
    batches = [ragged(generator, *sizes, dim, dtype, keep=keep, gap=gap) for sizes in (queries, documents)]
    if layout == "all":
        return *batches, None
    return *batches, torch.randint(documents[0], (queries[0], slots), generator=generator).to(DEVICE)


@pytest.mark.parametrize("dim", [1, 7, 48, 64, 96, 128, 200, 256, 768, 1024])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["all", "candidates"])
def test_dimensions(dim, dtype, layout):
    check(*problem(layout, (19, 32), (37, 300), dim, dtype, slots=11, keep=0.8))


@pytest.mark.parametrize("precision", ["high", "medium"])
@pytest.mark.parametrize("dim", [48, 128, 768])
@pytest.mark.parametrize("layout", ["all", "candidates"])
def test_lower_float32_precision(precision, dim, layout):
    check(*problem(layout, (9, 40), (23, 200), dim, torch.float32), precision=precision)


def test_random_shapes(capsys):
    assert random_shapes.main(["--count", "200", "--families", "16"], maxsim_kernels, DEVICE) == 0, (
        capsys.readouterr().out
    )


@pytest.mark.parametrize("gap", [0, 1])
@pytest.mark.parametrize("longest", [32, 40])
@pytest.mark.parametrize("repeated", [False, True])
@pytest.mark.parametrize("scanned", [0, 2**13], ids=["ordered", "scanned"])
def test_no_more_pairs_than_documents(monkeypatch, scanned, repeated, longest, gap):
    monkeypatch.setattr(winner_backward, "_SCANNED_PAIRS", scanned)
    generator = torch.Generator().manual_seed(0)
    queries = ragged(generator, 8, longest, 96, torch.bfloat16, gap=gap)
    documents = ragged(generator, 40, 300, 96, torch.bfloat16, gap=gap)
    candidates = torch.randperm(40, generator=generator).view(8, 5)
    check(queries, documents, (candidates // 3 if repeated else candidates).to(DEVICE))


@pytest.mark.parametrize("layout", ["all", "candidates"])
def test_long_sums_of_float32_do_not_shrink(layout):
    # With d = 1 one of two tokens wins for every query token, and its gradient sums thousands of them.
    generator = torch.Generator().manual_seed(0)
    queries = ragged(generator, 64, 300, 1, torch.float32, shortest=300)
    documents = ragged(generator, 2, 50, 1, torch.float32)
    candidates = torch.randint(2, (64, 20), generator=generator).to(DEVICE) if layout == "candidates" else None
    check(queries, documents, candidates)


def test_long_documents():
    check(*problem("all", (20, 32), (3, 40000), 64))


@pytest.mark.parametrize("shared", [0, 7])
@pytest.mark.parametrize("gap", [0, 1])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_own_candidates_of_more_queries_than_are_read_at_once(dtype, gap, shared):
    generator = torch.Generator().manual_seed(0)
    queries = ragged(generator, 100, 32, 128, dtype)
    documents = ragged(generator, 3000, 180, 128, dtype, gap=gap)
    candidates = torch.randperm(3000, generator=generator).view(100, 30)
    # Some documents have the candidates of others as well, thousands of places away.
    candidates.view(-1)[:shared] = candidates.view(-1)[-shared or 3000 :]
    check(queries, documents, candidates.to(DEVICE))


@pytest.mark.parametrize("layout", ["all", "candidates", "own"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_runs_repeat_bit_by_bit(layout, dtype):
    generator = torch.Generator().manual_seed(0)
    queries = ragged(generator, 64, 32, 128, dtype)
    documents = ragged(generator, 1024 if layout == "own" else 128, 300, 128, dtype, gap=0 if layout == "own" else 1)
    candidates = None
    if layout != "all":
        own = torch.arange(1024).view(64, 16)
        candidates = (own if layout == "own" else torch.randint(128, own.shape, generator=generator)).to(DEVICE)
    grad = torch.randn(64, 128 if candidates is None else 16, device=DEVICE)
    first = run(queries, documents, candidates, grad=grad)
    for _ in range(20):
        assert all(map(torch.equal, first, run(queries, documents, candidates, grad=grad)))


@pytest.mark.parametrize("layout", ["all", "candidates"])
def test_nothing_waits_for_the_device(layout):
    inputs = problem(layout, (16, 32), (32, 100), keep=0.9)
    run(*inputs)
    with no_waiting():
        run(*inputs)


@pytest.mark.parametrize("layout", ["all", "candidates"])
def test_a_cuda_graph_captures_forward_and_backward(layout):
    # With gaps, because documents become shorter below.
    queries, documents, candidates = problem(layout, (16, 32), (32, 100), gap=1)
    graph, results = captured(lambda: run(queries, documents, candidates))
    for tensor in (queries.values, documents.values):
        tensor.copy_(torch.randn(tensor.shape, device=DEVICE))
    documents.lengths.sub_(documents.lengths // 2)
    if candidates is not None:
        candidates.copy_(candidates.flip(0))
    graph.replay()
    assert all(map(torch.equal, results, run(queries, documents, candidates)))


def check_last(count, queries, documents, scores, winners, grad_d):
    """The scores of the last ``count`` documents, and the gradients of their tokens, which are the last as well."""
    tail = documents.select(torch.arange(len(documents) - count, len(documents), device=DEVICE))
    exact = exact_scores(queries, tail)
    assert relative_error(scores[:, -count:], exact) < 2e-3
    _, _, exact_d = from_winners(queries, tail, None, winners[-count:], torch.ones_like(exact))
    rows = int(tail.lengths.sum())
    assert relative_error(grad_d[-rows:], exact_d[-rows:]) < 2e-3
    return exact, exact_d[-rows:]


def test_values_beyond_two_to_the_31_elements():
    if torch.cuda.mem_get_info()[0] < 40e9:
        pytest.skip("needs 40 GB of free GPU memory")
    length, count, dim = 300, 58500, 128
    values = torch.empty(count * length, dim, device=DEVICE, dtype=torch.bfloat16).normal_()
    assert values.numel() > 2**31
    documents = TokenBatch.from_padded(values.view(count, length, dim))
    queries = ragged(torch.Generator().manual_seed(0), 3, 8, dim, torch.bfloat16)
    scores, winners, grad_q, grad_d = run(queries, documents)
    # Their last documents as a batch of their own: in float64 all would not fit.
    last = TokenBatch.from_padded(values.view(count, length, dim)[-4:])
    exact, exact_d = check_last(4, queries, last, scores[:, -4:], winners[-4:], grad_d)
    grad_q64 = torch.zeros(queries.values.shape, dtype=torch.float64, device=DEVICE)
    for row in range(len(grad_q64)):
        grad_q64[row] = values[documents.starts + winner_index(winners[:, row].contiguous())].double().sum(dim=0)
    assert relative_error(grad_q, grad_q64) < 2e-3
    tail = torch.arange(count - 4, count, device=DEVICE)
    candidates = torch.stack([tail.flip(0), tail, tail])
    scores, _, _, grad_d = run(queries, documents, candidates)
    assert relative_error(scores, exact.gather(1, candidates - (count - 4))) < 2e-3
    assert relative_error(grad_d[-4 * length :], exact_d) < 2e-3


def test_winners_beyond_two_to_the_31_elements():
    if torch.cuda.mem_get_info()[0] < 40e9:
        pytest.skip("needs 40 GB of free GPU memory")
    dim, count = 16, 60000
    documents = TokenBatch.from_padded(torch.randn(count, 2, dim, device=DEVICE).bfloat16())
    queries = TokenBatch.from_padded(torch.randn(1250, 32, dim, device=DEVICE).bfloat16())
    scores, winners, _, grad_d = run(queries, documents)
    assert winners.numel() > 2**31
    check_last(4, queries, documents, scores, winners, grad_d)


def test_documents_are_scored_where_a_model_left_them():
    """The sizes of docs/search.md#in-python, whose documents take 38 MiB: no copy of them, 16 bytes a document, 4 a score."""
    output = torch.randn(512, 300, 128, device="cuda", dtype=torch.bfloat16)
    queries = torch.randn(256, 32, 128, device="cuda", dtype=torch.bfloat16)
    tokens = torch.randint(5, 301, (512,), device="cuda")

    def scores() -> torch.Tensor:
        starts = torch.arange(512, device="cuda") * 300 + 4
        return maxsim(queries, TokenBatch(output.view(-1, 128), starts, tokens - 4, 296))

    expected = maxsim(queries, TokenBatch.from_list([row[4:n] for row, n in zip(output, tokens.tolist(), strict=True)]))
    torch.testing.assert_close(scores(), expected)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    scores()
    peak = torch.cuda.max_memory_allocated() - before
    assert peak < 2 * 2**20, peak
