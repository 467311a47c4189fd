"""The kernels on a GPU at realistic sizes, against the definition in float64."""

from functools import partial

import exactness
import pytest
import torch
from exactness import from_winners, relative_error, winner_index
from on_gpu import DEVICE, DTYPES, captured, no_waiting, ragged

from pylate_fastmaxsim import TokenBatch, reference

pytest.importorskip("triton")

from pylate_fastmaxsim.kernels.maxsim import launch as maxsim_launch  # noqa: E402

pytestmark = pytest.mark.cuda


run = partial(exactness.run, maxsim_launch)
check = partial(exactness.check, maxsim_launch)


@pytest.mark.parametrize("dim", [1, 7, 48, 64, 96, 128, 200, 256, 768, 1024])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["all", "candidates"])
def test_dimensions(dim, dtype, layout):
    generator = torch.Generator().manual_seed(dim)
    queries = ragged(generator, 19, 32, dim, dtype)
    documents = ragged(generator, 37, 300, dim, dtype, keep=0.8)
    candidates = torch.randint(37, (19, 11), generator=generator).to(DEVICE) if layout == "candidates" else None
    check(queries, documents, candidates)


@pytest.mark.parametrize("precision", ["high", "medium"])
@pytest.mark.parametrize("dim", [48, 128, 768])
@pytest.mark.parametrize("layout", ["all", "candidates"])
def test_lower_float32_precision(precision, dim, layout):
    generator = torch.Generator().manual_seed(dim)
    queries = ragged(generator, 9, 40, dim, torch.float32)
    documents = ragged(generator, 23, 200, dim, torch.float32)
    candidates = torch.randint(23, (9, 5), generator=generator).to(DEVICE) if layout == "candidates" else None
    check(queries, documents, candidates, precision=precision)


@pytest.mark.parametrize("seed", range(24))
def test_random_shapes(seed):
    generator = torch.Generator().manual_seed(seed)

    def pick(*options):
        return options[int(torch.randint(len(options), (1,), generator=generator))]

    dtype, dim = pick(*DTYPES), pick(32, 96, 128)
    masked = pick(None, 0.7, 0.05)
    queries = ragged(
        generator, pick(1, 3, 50), pick(1, 5, 32, 33, 128, 129, 300), dim, dtype, pick(None, 0.8), pick(0, 1), 2
    )
    documents = ragged(
        generator, pick(1, 2, 65), pick(1, 63, 64, 65, 255, 256, 2000), dim, dtype, masked, pick(0, 1), 3
    )
    candidates = None
    if pick(True, False):
        shape = (len(queries), pick(1, 7, 40))
        candidates = torch.randint(len(documents), shape, generator=generator).to(DEVICE)
    zero_floor = pick(None, (torch.rand(len(documents), generator=generator) < 0.5).to(DEVICE))
    check(queries, documents, candidates, zero_floor)


@pytest.mark.parametrize("gap", [0, 1])
@pytest.mark.parametrize("longest", [32, 40])
@pytest.mark.parametrize("repeated", [False, True])
@pytest.mark.parametrize("scanned", [0, 2**13], ids=["ordered", "scanned"])
def test_no_more_pairs_than_documents(monkeypatch, scanned, repeated, longest, gap):
    monkeypatch.setattr(maxsim_launch, "_SCANNED_PAIRS", scanned)
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
    generator = torch.Generator().manual_seed(0)
    documents = ragged(generator, 3, 40000, 64, torch.bfloat16, shortest=30000)
    check(ragged(generator, 20, 32, 64, torch.bfloat16), documents)


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
    generator = torch.Generator().manual_seed(0)
    queries = ragged(generator, 16, 32, 128, torch.bfloat16, keep=0.9)
    documents = ragged(generator, 32, 100, 128, torch.bfloat16, keep=0.9)
    candidates = torch.randint(32, (16, 4), generator=generator).to(DEVICE) if layout == "candidates" else None
    run(queries, documents, candidates)
    with no_waiting():
        run(queries, documents, candidates)


@pytest.mark.parametrize("layout", ["all", "candidates"])
def test_a_cuda_graph_captures_forward_and_backward(layout):
    generator = torch.Generator().manual_seed(0)
    queries = ragged(generator, 16, 32, 128, torch.bfloat16)
    # With gaps, because documents become shorter below.
    documents = ragged(generator, 32, 100, 128, torch.bfloat16, gap=1)
    candidates = torch.randint(32, (16, 4), generator=generator).to(DEVICE) if layout == "candidates" else None
    graph, results = captured(lambda: run(queries, documents, candidates))
    for tensor in (queries.values, documents.values):
        tensor.copy_(torch.randn(tensor.shape, device=DEVICE))
    documents.lengths.sub_(documents.lengths // 2)
    if candidates is not None:
        candidates.copy_(candidates.flip(0))
    graph.replay()
    assert all(map(torch.equal, results, run(queries, documents, candidates)))


def free_bytes():
    return torch.cuda.mem_get_info()[0]


def test_values_beyond_two_to_the_31_elements():
    if free_bytes() < 40e9:
        pytest.skip("needs 40 GB of free GPU memory")
    length, count, dim = 300, 58500, 128
    values = torch.empty(count * length, dim, device=DEVICE, dtype=torch.bfloat16).normal_()
    assert values.numel() > 2**31
    documents = TokenBatch.from_padded(values.view(count, length, dim))
    queries = ragged(torch.Generator().manual_seed(0), 3, 8, dim, torch.bfloat16)
    scores, winners, grad_q, grad_d = run(queries, documents)
    tail = torch.arange(count - 4, count, device=DEVICE)
    last = TokenBatch.from_padded(values.view(count, length, dim)[-4:])
    exact = reference.maxsim(queries.with_values(queries.values.double()), last.with_values(last.values.double()))
    assert relative_error(scores[:, tail], exact) < 2e-3
    _, _, exact_d = from_winners(queries, last, None, winners[tail], torch.ones_like(exact))
    assert relative_error(grad_d[-4 * length :], exact_d) < 2e-3
    grad_q64 = torch.zeros(queries.values.shape, dtype=torch.float64, device=DEVICE)
    for row in range(len(grad_q64)):
        grad_q64[row] = values[documents.starts + winner_index(winners[:, row].contiguous())].double().sum(dim=0)
    assert relative_error(grad_q, grad_q64) < 2e-3
    candidates = torch.stack([tail.flip(0), tail, tail])
    scores, _, _, grad_d = run(queries, documents, candidates)
    assert relative_error(scores, exact.gather(1, candidates - (count - 4))) < 2e-3
    assert relative_error(grad_d[-4 * length :], exact_d) < 2e-3


def test_winners_beyond_two_to_the_31_elements():
    if free_bytes() < 40e9:
        pytest.skip("needs 40 GB of free GPU memory")
    dim, count = 16, 60000
    documents = TokenBatch.from_padded(torch.randn(count, 2, dim, device=DEVICE).bfloat16())
    queries = TokenBatch.from_padded(torch.randn(1250, 32, dim, device=DEVICE).bfloat16())
    scores, winners, _, grad_d = run(queries, documents)
    assert winners.numel() > 2**31
    last = documents.select(torch.arange(count - 4, count, device=DEVICE))
    exact = reference.maxsim(queries.with_values(queries.values.double()), last.with_values(last.values.double()))
    assert relative_error(scores[:, -4:], exact) < 2e-3
    _, _, exact_d = from_winners(queries, last, None, winners[-4:], torch.ones_like(exact))
    assert relative_error(grad_d[-8:], exact_d[-8:]) < 2e-3
