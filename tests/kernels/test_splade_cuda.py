"""The kernels of SPLADE's pooling on a GPU at realistic sizes, against the definition in float64."""

import random

import pytest
import torch

from tests.support.on_gpu import DEVICE, DTYPES, captured, no_waiting

pytest.importorskip("triton")

from pylate_fastmaxsim import TokenBatch, splade_pool  # noqa: E402
from tests.support.splade_exactness import ACTIVATIONS, check  # noqa: E402
from tests.support.splade_problems import random_splade_problem  # noqa: E402

pytestmark = pytest.mark.cuda

PRECISIONS = {"highest": 2e-6, "high": 1e-4, "medium": 5e-3}


def texts(seed, number, longest):
    draw = random.Random(seed)
    return tuple(draw.choice((0, 1, draw.randint(1, longest), longest)) for _ in range(number))


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_activations(dtype, activation):
    check(
        random_splade_problem(0, lengths=texts(0, 40, 300), dim=768, vocabulary=3001, dtype=dtype, device=DEVICE),
        activation,
    )


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dim", [1, 32, 100, 384, 1024])
def test_dimensions(dim, masked):
    problem = random_splade_problem(
        dim, lengths=texts(dim, 30, 100), dim=dim, vocabulary=1000, dtype=torch.bfloat16, masked=masked, device=DEVICE
    )
    check(problem)


def test_packed_texts_of_a_training_step():
    """Back to back, as the flag has them, of more numbers than a block, with a bias that bans some rows."""
    problem = random_splade_problem(
        2, lengths=texts(2, 64, 120), dim=1500, vocabulary=3000, dtype=torch.bfloat16, masked=False, device=DEVICE
    )
    parts = [torch.randn(length, 1500, device=DEVICE).bfloat16() for length in problem.hidden.lengths]
    problem = problem._replace(hidden=TokenBatch.from_list(parts))
    assert problem.hidden.gapless
    check(problem)
    problem.bias[::7] = -torch.inf
    assert (splade_pool(*problem, activation_function=None, log1p=False)[:, ::7] <= 0).all()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_precisions_of_float32(precision):
    problem = random_splade_problem(1, lengths=texts(1, 30, 100), dim=768, vocabulary=1000, device=DEVICE)
    check(problem, precision=precision, tolerance=PRECISIONS[precision])


@pytest.mark.parametrize("seed", range(25))
def test_random_shapes(seed):
    draw = random.Random(seed)
    problem = random_splade_problem(
        seed,
        lengths=texts(seed, draw.choice((1, 2, 9, 70, 300)), draw.choice((1, 12, 130, 500))),
        dim=draw.choice((8, 64, 200, 768)),
        vocabulary=draw.choice((1, 127, 129, 2000)),
        masked=draw.random() < 0.5,
        with_bias=draw.random() < 0.7,
        bias_mean=draw.choice((-4.0, -1.0, 1.0)),
        dtype=draw.choice(DTYPES),
        bias_dtype=draw.choice((torch.float32, torch.bfloat16)),
        device=DEVICE,
    )
    check(
        problem,
        draw.choice(list(ACTIVATIONS)),
    )


def test_small_values_are_precise():
    """log(1 + x) of a small x, relative to itself."""
    hidden = torch.eye(64, device=DEVICE)[None].repeat(1, 2, 1)
    weight = torch.logspace(-20, 4, 64, device=DEVICE)[:, None].repeat(1, 64).contiguous()
    expected = weight[:, 0].double().log1p()
    torch.testing.assert_close(splade_pool(hidden, weight)[0].double(), expected, rtol=2e-6, atol=0)


def test_repeatable_without_waiting_and_in_a_graph():
    problem = random_splade_problem(
        3, lengths=texts(3, 100, 200), dim=768, vocabulary=5000, dtype=torch.bfloat16, device=DEVICE
    ).with_gradients()

    def run():
        values = splade_pool(problem.hidden, problem.weight, problem.bias)
        return values.detach(), *torch.autograd.grad(values.square().sum(), problem.leaves)

    expected = run()
    with no_waiting():
        again = run()
    graph, replayed = captured(run)
    graph.replay()
    assert all(map(torch.equal, again, expected)) and all(map(torch.equal, replayed, expected))


def test_offsets_beyond_two_to_the_31():
    """More values than 32 bits can count."""
    number, rows = 9000, 250_000
    hidden = torch.randn(number, 2, 16, device=DEVICE).bfloat16()
    weight = torch.randn(rows, 16, device=DEVICE).bfloat16()
    leaves = hidden.requires_grad_(), weight.requires_grad_()
    values = splade_pool(*leaves)
    last = splade_pool(hidden[-3:], weight)
    assert torch.equal(values[-3:], last)
    (grad,) = torch.autograd.grad(values[-3:].sum(), hidden)
    (expected,) = torch.autograd.grad(last.sum(), hidden)
    assert torch.equal(grad, expected)
