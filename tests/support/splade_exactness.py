"""Checks kernels of SPLADE's pooling against the definition in float64."""

from __future__ import annotations

import torch
from splade_problems import SpladeProblem, exact_splade

from pylate_fastmaxsim._winners import no_winner
from pylate_fastmaxsim.kernels.splade import launch

# (rectified, logs) of a call by its arguments.
ACTIVATIONS = {
    ("relu", True): (True, 1),
    ("log1p_relu", True): (True, 2),
    ("relu", False): (True, 0),
    (None, False): (False, 0),
}
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}


def check(
    problem: SpladeProblem,
    activation: tuple[str | None, bool] = ("relu", True),
    tiles: launch.MaximaTiles | None = None,
    precision: str = "highest",
    tolerance: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and winners, after checking them, and the gradients that come of them."""
    operands = problem.operands(*ACTIVATIONS[activation])
    values, winners = launch.forward(operands, True, precision, tiles)
    without, _ = launch.forward(operands, False, precision, tiles)
    assert torch.equal(without, values) and _ is None
    generator = torch.Generator().manual_seed(7)
    grad = torch.randn(values.shape, generator=generator).to(values.device)
    exact, gradients = exact_splade(problem, grad, *activation)
    of_values = tolerance or 2e-6
    assert _error(values, exact) <= of_values
    passes = winners != no_winner(winners.dtype)
    if operands.rectified:
        assert torch.equal(passes, values > 0)
    actual = launch.backward(grad, values, winners, operands, precision, True, True, problem.bias is not None)
    for mine, right in zip(actual, gradients, strict=False):
        assert mine.dtype == problem.weight.dtype or mine is actual[2]
        assert _error(mine, right) <= (tolerance or TOLERANCE[mine.dtype])
    return values, winners


def _error(actual: torch.Tensor, exact: torch.Tensor) -> float:
    if exact.numel() == 0:
        return 0.0
    return ((actual.double() - exact).abs().max() / exact.abs().max().clamp(min=1e-3)).item()
