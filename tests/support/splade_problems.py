"""Random calls of SPLADE's head, for the operator and for its kernels, and their results in float64."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pylate_fastmaxsim import TokenBatch, reference
from pylate_fastmaxsim._operands import SpladeOperands
from tests.support.ragged_batches import ragged
from tests.support.random_shapes import on_device


class SpladeProblem(NamedTuple):
    """Hidden states, whose rows that do not count are NaN, and the output embedding."""

    hidden: TokenBatch
    weight: Tensor
    bias: Tensor | None

    def operands(self, rectified: bool = True, logs: int = 1) -> SpladeOperands:
        hidden = self.hidden
        return SpladeOperands(
            hidden.values, hidden.starts, hidden.lengths, hidden.keep, self.weight, self.bias,
            hidden.max_length, hidden.gapless, rectified, logs,
        )  # fmt: skip

    def with_gradients(self) -> SpladeProblem:
        """The same as leaves that require gradients."""
        values, weight, bias = (
            None if tensor is None else tensor.detach().clone().requires_grad_()
            for tensor in (self.hidden.values, self.weight, self.bias)
        )
        return SpladeProblem(self.hidden.with_values(values), weight, bias)

    @property
    def leaves(self) -> list[Tensor]:
        return [tensor for tensor in (self.hidden.values, self.weight, self.bias) if tensor is not None]


def random_splade_problem(
    seed: int,
    *,
    lengths: tuple[int, ...] = (7, 0, 20, 3, 33, 1, 0, 9),
    dim: int = 16,
    vocabulary: int = 70,
    masked: bool = True,
    integers: bool = False,
    with_bias: bool = True,
    bias_mean: float = -1.0,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    bias_dtype: torch.dtype = torch.float32,
) -> SpladeProblem:
    """Texts of ``lengths`` in shuffled order with unused rows between them; some tokens are masked.

    ``integers``: small integers, for which logits are exact in any dtype and ties abound. Otherwise logits have a standard
    deviation of about 1. The mean of the bias decides how many values are positive.
    """
    generator = torch.Generator().manual_seed(seed)
    hidden = ragged(generator, list(lengths), dim, dtype, integers, masked)
    if integers:
        weight = torch.randint(-2, 3, (vocabulary, dim), generator=generator).to(dtype)
        bias = torch.randint(-3, 4, (vocabulary,), generator=generator) + round(bias_mean)
    else:
        weight = (torch.randn(vocabulary, dim, generator=generator) * dim**-0.5).to(dtype)
        bias = torch.randn(vocabulary, generator=generator) + bias_mean
    bias = bias.to(bias_dtype).to(device) if with_bias else None
    return SpladeProblem(on_device(hidden, device), weight.to(device), bias)


def exact_splade(
    problem: SpladeProblem, grad: Tensor, activation_function: str | None = "relu", log1p: bool = True
) -> tuple[Tensor, list[Tensor]]:
    """Values in float64, and the gradients of hidden states, weight and bias by autograd of the definition."""
    exact = SpladeProblem(
        problem.hidden.with_values(problem.hidden.values.double()),
        problem.weight.double(),
        None if problem.bias is None else problem.bias.double(),
    ).with_gradients()
    values = reference.splade_pool(*exact, activation_function, log1p)
    return values.detach(), list(torch.autograd.grad(values, exact.leaves, grad.double()))
