"""Checks kernels of SPLADE's pooling against the definition in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from pylate_fastmaxsim._winners import no_winner
from pylate_fastmaxsim.kernels.splade import launch
from tests.support.splade_problems import SpladeProblem, exact_splade

# (rectified, logs) of a call by its arguments.
ACTIVATIONS = {
    ("relu", True): (True, 1),
    ("log1p_relu", True): (True, 2),
    ("relu", False): (True, 0),
    (None, False): (False, 0),
}
# Matrix units truncate the sums of 16-bit products.
OF_VALUES = {torch.float32: 2e-6, torch.float16: 2e-5, torch.bfloat16: 2e-5}
OF_GRADIENTS = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def check(
    problem: SpladeProblem,
    activation: tuple[str | None, bool] = ("relu", True),
    precision: str = "highest",
    tolerance: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Values and winners, after checking them and the gradients that come of these winners.

    Another token than in float64 may win whose logit is equal up to rounding. So gradients are those of the winners found.
    """
    operands = problem.operands(*ACTIVATIONS[activation])
    values, winners = launch.forward(operands, True, precision)
    without_winners, none = launch.forward(operands, False, precision)
    assert torch.equal(without_winners, values)
    assert none is None
    grad = torch.randn(values.shape, generator=torch.Generator().manual_seed(7)).to(values.device)
    exact, _ = exact_splade(problem, grad, *activation)
    won, best, slopes, gradients = _of_winners(problem, winners, grad, operands.logs)
    of_values = tolerance or OF_VALUES[problem.weight.dtype]
    for actual in (values, best):
        assert error(actual, exact) <= of_values
    if operands.rectified:
        assert torch.equal(won, values > 0)
    actual = launch.backward(grad, values, winners, operands, precision, True, True, problem.bias is not None)
    # The gradient of a bias is a plain sum, and its terms may cancel.
    least = 1e-2, 1e-2, max(1e-2, slopes.abs().max().item() if slopes.numel() else 0.0)
    for mine, leaf, expected, scale in zip(actual, problem.leaves, gradients, least, strict=False):
        assert mine.dtype == leaf.dtype
        assert error(mine, expected, scale) <= (tolerance or OF_GRADIENTS[leaf.dtype])
    return values, winners


def _of_winners(
    problem: SpladeProblem, winners: Tensor, grad: Tensor, logs: int
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor, Tensor]]:
    """In float64: where there is a winner, the values that these winners give, their slopes and all gradients."""
    won = winners != no_winner(winners.dtype)
    hidden, weight = problem.hidden.values.double(), problem.weight.double()
    grad_hidden, grad_weight = torch.zeros_like(hidden), torch.zeros_like(weight)
    slopes = torch.where(won, grad.double(), 0.0)
    best = torch.zeros_like(slopes)
    for text, start in enumerate(problem.hidden.starts.tolist()):
        here = won[text].nonzero()[:, 0]
        rows = start + winners[text, here].long()
        value = (hidden[rows] * weight[here]).sum(dim=1)
        if problem.bias is not None:
            value = value + problem.bias.double()[here]
        for _ in range(logs):
            slopes[text, here] /= 1 + value
            value = value.log1p()
        best[text, here] = value
        grad_weight[here] += slopes[text, here, None] * hidden[rows]
        grad_hidden.index_add_(0, rows, slopes[text, here, None] * weight[here])
    return won, best, slopes, (grad_hidden, grad_weight, slopes.sum(dim=0))


def error(actual: Tensor, exact: Tensor, least: float = 1e-2) -> float:
    """The largest difference, beside the largest number, which counts as ``least`` where it is smaller."""
    if exact.numel() == 0:
        return 0.0
    return ((actual.double() - exact).abs().max() / exact.abs().max().clamp(min=least)).item()
