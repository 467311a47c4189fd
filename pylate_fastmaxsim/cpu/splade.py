"""SPLADE's head in blocked PyTorch: MaxSim with the rows of the output embedding as queries of one token.

Bias, relu and logarithm are monotone, so that they come after the maximum, on ``[N, V]`` numbers.
"""

import torch
from torch import Tensor

from pylate_fastmaxsim._dtypes import sum_dtype
from pylate_fastmaxsim._operands import ScoringOperands, SpladeOperands
from pylate_fastmaxsim._winners import no_winner, winner_dtype
from pylate_fastmaxsim.cpu import maxsim as blocked
from pylate_fastmaxsim.cpu.live_tokens import live_tokens

# Vocabulary rows of a block: few enough to stay in the caches while all tokens pass, and the only float32 copies.
ROWS = 1 << 12


def forward(operands: SpladeOperands, want_winners: bool) -> tuple[Tensor, Tensor | None]:
    """Values ``[N, V]`` and winners ``[N, V]`` (``None`` if not wanted); see :mod:`pylate_fastmaxsim.ops.splade`."""
    hidden, weight, bias = operands.hidden, operands.weight, operands.bias
    shape = len(operands.starts), len(weight)
    values = hidden.new_empty(shape, dtype=sum_dtype(hidden.dtype))
    winners = hidden.new_empty(shape, dtype=winner_dtype(operands.max_length)) if want_winners else None
    for first in range(0, len(weight), ROWS):
        rows = slice(first, first + ROWS)
        maxima, won = blocked.forward(_as_maxsim(operands, weight[rows]), want_winners)
        values[:, rows] = maxima.t()
        if want_winners:
            winners[:, rows] = won
    if bias is not None:
        values += bias.to(values.dtype)
    empty = live_tokens(operands.starts, operands.lengths, operands.keep).count == 0
    values.masked_fill_(empty[:, None], 0)
    if operands.rectified:
        values.relu_()
        if want_winners:
            winners.masked_fill_(values <= 0, no_winner(winners.dtype))  # not of NaN
    for _ in range(operands.logs):
        values.log1p_()
    return values, winners


def backward(
    grad: Tensor,
    values: Tensor,
    winners: Tensor,
    operands: SpladeOperands,
    need_hidden: bool,
    need_weight: bool,
    need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of ``hidden``, ``weight`` and ``bias`` (empty if not needed) from what :func:`forward` returned."""
    grad = grad.to(values.dtype) * slope(values, operands.logs)
    grad = grad.masked_fill_(winners == no_winner(winners.dtype), 0)
    grad_bias = grad.sum(dim=0).to(operands.bias.dtype) if need_bias else grad.new_empty(0)
    grad_weight, grad_hidden = blocked.backward(
        grad.t(), winners, _as_maxsim(operands, operands.weight), need_weight, need_hidden
    )
    return grad_hidden, grad_weight, grad_bias


def slope(values: Tensor, logs: int) -> Tensor:
    """Derivative of ``logs`` log1p at a positive number, from the value they gave."""
    slopes = torch.ones_like(values)
    for _ in range(logs):
        # The derivative of log1p at x is 1 / (1 + x) = exp(-log1p(x)).
        slopes *= torch.exp(-values)
        values = torch.expm1(values)
    return slopes


def _as_maxsim(operands: SpladeOperands, weight: Tensor) -> ScoringOperands:
    """Vocabulary rows as queries of one token, texts as documents."""
    starts = torch.arange(len(weight), device=weight.device)
    return ScoringOperands(
        weight, starts, torch.ones_like(starts), None,
        operands.hidden, operands.starts, operands.lengths, operands.keep,
        None, None, 1, operands.max_length, True, operands.gapless,
    )  # fmt: skip
