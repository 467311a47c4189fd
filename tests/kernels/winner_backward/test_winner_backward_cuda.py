"""Gradients of winners chosen at random, on a GPU."""

import pytest
import torch

from tests.support.on_gpu import DEVICE, DTYPES, captured, no_waiting, ragged

pytest.importorskip("triton")

from pylate_fastmaxsim import TokenBatch  # noqa: E402
from pylate_fastmaxsim._operands import ScoringOperands  # noqa: E402
from pylate_fastmaxsim.kernels.winner_backward import launch  # noqa: E402
from tests.support.exactness import TOLERANCE, from_winners, relative_error  # noqa: E402
from tests.support.winner_gradients import check, random_winners  # noqa: E402

pytestmark = pytest.mark.cuda


def problem(generator, layout, dim=128, dtype=torch.bfloat16, queries=(19, 32), documents=(37, 300), gap=1):
    """Queries and documents, of each their number and the longest, and candidates."""
    batches = [ragged(generator, *sizes, dim, dtype, gap=gap) for sizes in (queries, documents)]
    if layout == "all":
        return *batches, None
    if layout == "own":
        return *batches, torch.randperm(documents[0], generator=generator)[: queries[0], None].to(DEVICE)
    return *batches, torch.randint(documents[0], (queries[0], 5), generator=generator).to(DEVICE)


@pytest.mark.parametrize("ranks", [1, 2, 4, 7, 64])
@pytest.mark.parametrize("layout", ["all", "shared", "own"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ranks(dtype, layout, ranks):
    generator = torch.Generator().manual_seed(ranks)
    check(generator, *problem(generator, layout, dtype=dtype), ranks, TOLERANCE[dtype, "highest"])


@pytest.mark.parametrize("layout", ["all", "shared"])
@pytest.mark.parametrize("seed", range(20))
def test_random_shapes(layout, seed):
    generator = torch.Generator().manual_seed(seed)

    def number(low, high):
        return int(torch.randint(low, high + 1, (), generator=generator))

    dtype = DTYPES[number(0, 2)]
    sizes = {"queries": (number(1, 40), number(1, 200)), "documents": (number(1, 60), number(1, 700))}
    batches = problem(generator, layout, (1, 7, 48, 64, 96, 200, 768)[number(0, 6)], dtype, **sizes, gap=number(0, 1))
    # Few numbers may round worse than the root mean square of many.
    check(generator, *batches, number(1, 12), 2.5 * TOLERANCE[dtype, "highest"])


@pytest.mark.parametrize("precision", ["high", "medium"])
@pytest.mark.parametrize("layout", ["all", "shared"])
def test_lower_float32_precision(layout, precision):
    generator = torch.Generator().manual_seed(0)
    batches = problem(generator, layout, dtype=torch.float32)
    check(generator, *batches, 4, TOLERANCE[torch.float32, precision], precision)


@pytest.mark.parametrize("layout", ["all", "shared"])
def test_nothing_waits_and_a_graph_captures_it(layout):
    generator = torch.Generator().manual_seed(0)
    queries, documents, candidates = problem(generator, layout)
    winners = random_winners(generator, queries, documents, candidates, 4)
    grad = torch.randn(len(queries), len(winners), device=DEVICE)
    operands = ScoringOperands.of(queries, documents, candidates)

    def run():
        return launch.backward(grad, winners, operands, "highest", True, True)

    first = run()
    with no_waiting():
        again = run()
    assert all(map(torch.equal, first, again))
    graph, results = captured(run)
    grad.neg_()
    graph.replay()
    assert all(torch.equal(-ours, expected) for ours, expected in zip(results, first, strict=True))


def test_winners_beyond_two_to_the_31_elements():
    if torch.cuda.mem_get_info()[0] < 20e9:
        pytest.skip("needs 20 GB of free GPU memory")
    ranks, count, length, last = 64, 20000, 70, 4
    documents = TokenBatch.from_padded(torch.randn(count, length, 16, device=DEVICE).bfloat16())
    queries = TokenBatch.from_padded(torch.randn(64, 32, 16, device=DEVICE).bfloat16())
    rows = len(queries.values)
    winners = torch.randint(length, (count, 1, rows), dtype=torch.uint8, device=DEVICE)
    winners = (winners + torch.arange(ranks, dtype=torch.uint8, device=DEVICE)[:, None]) % length
    assert winners.numel() > 2**31
    # Only the last documents have a gradient: 2.6 billion winners are too many for the comparison.
    grad = torch.zeros(64, count, device=DEVICE)
    grad[:, -last:] = torch.randn(64, last, device=DEVICE)
    operands = ScoringOperands.of(queries, documents)
    grad_q, grad_d = launch.backward(grad, winners, operands, "highest", True, True)
    tail = documents.select(torch.arange(count - last, count, device=DEVICE))
    parts = [from_winners(queries, tail, None, own, grad[:, -last:]) for own in winners[-last:].unbind(dim=1)]
    _, exact_q, exact_d = (sum(part) for part in zip(*parts, strict=True))
    assert relative_error(grad_q, exact_q) < 2e-3
    assert relative_error(grad_d[-last * length :], exact_d[-last * length :]) < 2e-3
    assert not grad_d[: -last * length].any()
