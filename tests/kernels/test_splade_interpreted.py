"""The kernels of SPLADE's pooling through Triton's interpreter. Run with TRITON_INTERPRET=1."""

import pytest
import torch

pytest.importorskip("triton")

from pylate_fastmaxsim import TokenBatch, reference
from pylate_fastmaxsim._winners import no_winner
from pylate_fastmaxsim.kernels.splade import launch
from pylate_fastmaxsim.kernels.splade.launch import MaximaTiles
from tests.support.chosen_tiles import choose_tiles
from tests.support.interpreter import interpreted, spread_out  # noqa: F401
from tests.support.splade_exactness import ACTIVATIONS, check
from tests.support.splade_problems import random_splade_problem

pytestmark = [pytest.mark.interpret, pytest.mark.usefixtures("interpreted")]


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch):
    choose_tiles(monkeypatch, launch, maxima=MaximaTiles(16, 32, 16, 2, 4, 1))


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_activations(activation):
    """Several tiles of texts and of vocabulary rows; masked tokens, empty texts, several chunks of d."""
    check(random_splade_problem(0, dim=40, vocabulary=50), activation)


@pytest.mark.parametrize(
    "dtype, dim, masked", [(torch.bfloat16, 24, False), (torch.float16, 1, True), (torch.float32, 17, False)], ids=str
)
def test_dtypes_and_dimensions(dtype, dim, masked):
    check(random_splade_problem(1, dim=dim, vocabulary=33, dtype=dtype, masked=masked))


def test_no_bias_and_one_row():
    check(random_splade_problem(2, vocabulary=1, with_bias=False))


def test_the_first_of_equal_maxima_wins():
    """Of a text with more tokens than a tile, in integers, whose sums are exact."""
    problem = random_splade_problem(3, lengths=(70, 9, 1), dim=4, integers=True, masked=False)
    operands = problem.operands()
    values, winners = launch.forward(operands, True, "highest")
    hidden = problem.hidden
    for text, (start, length) in enumerate(zip(hidden.starts.tolist(), hidden.lengths.tolist(), strict=True)):
        logits = hidden.values[start : start + length] @ problem.weight.T + problem.bias
        best = (logits == logits.amax(dim=0)).int().argmax(dim=0)
        best[logits.amax(dim=0) <= 0] = no_winner(winners.dtype)
        assert torch.equal(winners[text].long(), best)


@pytest.mark.parametrize("where", ["hidden", "weight", "bias"])
@pytest.mark.parametrize("activation", [("relu", True), (None, False)], ids=str)
def test_not_a_number_shows(where, activation):
    problem = random_splade_problem(4, lengths=(5, 9), masked=False, vocabulary=20)
    hidden = problem.hidden
    if where == "hidden":
        hidden.values[hidden.starts[1] + 3, 2] = torch.nan
    elif where == "weight":
        problem.weight[7, 0] = torch.nan
    else:
        problem.bias[7] = -torch.tensor(torch.nan)
    operands = problem.operands(*ACTIVATIONS[activation])
    values, winners = launch.forward(operands, True, "highest")
    expected = torch.zeros(2, 20, dtype=torch.bool)
    expected[(1, slice(None)) if where == "hidden" else (slice(None), 7)] = True
    assert torch.equal(values.isnan(), expected)
    if not operands.logs:
        return
    grads = launch.backward(torch.ones_like(values), values, winners, operands, "highest", True, True, True)
    assert all(grad.isnan().any() for grad in grads)
    assert torch.equal(grads[2].isnan(), expected.any(dim=0))


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_infinities_are_kept(activation):
    """Of a bias of -infinity, as that of vocabulary rows that are never to be chosen."""
    problem = random_splade_problem(6, vocabulary=20, bias_mean=0.0)
    problem.bias[3], problem.bias[17] = -torch.inf, torch.inf
    operands = problem.operands(*ACTIVATIONS[activation])
    values, _ = launch.forward(operands, False, "highest")
    expected = reference.splade_pool(*problem, *activation)
    assert expected.isinf().any()
    torch.testing.assert_close(values.double(), expected, rtol=2e-6, atol=2e-6)


def backward(operands, grad, values, winners, *needs):
    return launch.backward(grad, values, winners, operands, "highest", *needs)


def test_packed_texts_and_more_numbers_than_a_block_has():
    """Texts back to back, whose gradient no zeros are filled in before, of more than 1024 numbers a token."""
    problem = random_splade_problem(7, lengths=(1, 9, 0, 2), dim=1030, vocabulary=5, masked=False)
    hidden = TokenBatch.from_list([torch.randn(length, 1030) for length in problem.hidden.lengths])
    assert hidden.gapless
    check(problem._replace(hidden=hidden))


@pytest.mark.parametrize("lengths, vocabulary", [((), 3), ((0, 0), 3), ((4, 1), 0)])
def test_nothing_to_pool(lengths, vocabulary):
    problem = random_splade_problem(8, lengths=lengths, vocabulary=vocabulary)
    values, winners = check(problem)
    assert values.shape == winners.shape == (len(lengths), vocabulary)


def test_gradients_that_are_not_needed_change_no_others():
    problem = random_splade_problem(9, vocabulary=20)
    operands = problem.operands()
    values, winners = launch.forward(operands, True, "highest")
    grad = torch.randn(values.shape)
    expected = backward(operands, grad, values, winners, True, True, True)
    for i in range(3):
        needs = [i == j for j in range(3)]
        for found, gradient, need in zip(
            backward(operands, grad, values, winners, *needs), expected, needs, strict=True
        ):
            assert torch.equal(found, gradient) if need else found.numel() == 0


def test_strided_tensors_and_texts_that_share_rows():
    problem = random_splade_problem(5, vocabulary=20)
    values, winners = check(problem)
    operands = problem.operands()
    strided = type(operands)(*(spread_out(x) if isinstance(x, torch.Tensor) else x for x in operands))
    assert torch.equal(launch.forward(strided, False, "highest")[0], values)
    # As the gradient of a sum over the vocabulary.
    grad = torch.randn(len(values), 1).expand(values.shape)
    expected = backward(operands, grad.contiguous(), values, winners, True, True, True)
    found = backward(strided, grad, values, winners, True, True, True)
    assert all(map(torch.equal, found, expected))
    repeated = torch.tensor([4, 2, 4, 4, 2, 4, 4, 4, 2, 2])
    shared = problem._replace(hidden=problem.hidden.select(repeated)).operands()
    assert torch.equal(launch.forward(shared, False, "highest")[0], values[repeated])
