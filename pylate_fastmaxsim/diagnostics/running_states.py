"""What of the similarities so far determines a pooled one, so that more tokens can join without the first ones.

A state is a tensor ``[..., n]`` for a pooling over the last dimension of similarities ``[..., L]``, in which -inf stands
for no token. It serves diagnostics, which pool the same similarities in several ways; scores of a training are those of
:func:`~pylate_fastmaxsim.pooled_scores`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pylate_fastmaxsim.pooling import LogSumExp, Max, Pooling, Softmax, TopK


def kind_of(pooling: Pooling) -> TopK | Softmax:
    """The pooling of which this one shares the states."""
    if isinstance(pooling, Max):
        return TopK(1)
    return Softmax(pooling.temperature) if isinstance(pooling, LogSumExp) else pooling


def state_of(kind: TopK | Softmax, similarities: Tensor) -> Tensor:
    """The state of these tokens: the k largest similarities in order, or the log of the sum of exponentials and the mean."""
    length = similarities.shape[-1]
    if isinstance(kind, TopK):
        if kind.k == 1 and length:
            return similarities.amax(dim=-1, keepdim=True)
        best = similarities.topk(min(kind.k, length)).values
        return torch.nn.functional.pad(best, (0, kind.k - best.shape[-1]), value=-torch.inf)
    lowest = torch.finfo(similarities.dtype).min  # for -inf, which is no number to subtract or to multiply by 0
    largest = similarities.amax(dim=-1, keepdim=True).clamp(min=lowest) if length else similarities.sum(-1, True)
    weights = ((similarities - largest) / kind.temperature).exp_()
    total = weights.sum(dim=-1, keepdim=True)
    mean = weights.mul_(similarities.clamp(min=lowest)).sum(dim=-1, keepdim=True) / total.clamp(min=1)
    return torch.cat((total.log() + largest / kind.temperature, mean), dim=-1)


def joined(kind: TopK | Softmax, state: Tensor, more: Tensor) -> tuple[Tensor, Tensor]:
    """The state of the tokens of both, to be pooled, and the share ``[...]`` of the pooling's weight on those of ``more``.

    The states broadcast against each other. The weight of a top-k pooling is 1 for each of the k winners. That of softmax
    and log-sum-exp is ``softmax(S / temperature)``. Of equal similarities those of ``more`` come last.
    """
    if isinstance(kind, TopK):
        # The k largest of two lists in order are these, though not in order.
        more = more.flip(-1)
        best = torch.maximum(state, more)
        live = (best > -torch.inf).sum(dim=-1).clamp(min=1)
        return best, (more > state).sum(dim=-1) / live
    log_sum = torch.logaddexp(state[..., 0], more[..., 0])
    share = (more[..., 0] - log_sum).exp().masked_fill(log_sum == -torch.inf, 0)
    return torch.stack((log_sum, torch.lerp(state[..., 1], more[..., 1], share)), dim=-1), share


def pooled(pooling: Pooling, state: Tensor) -> Tensor:
    """The pooled similarity ``[...]``, 0 without a token."""
    if isinstance(pooling, (Max, TopK)):
        live = state > -torch.inf
        return state.masked_fill(~live, 0).sum(dim=-1) / live.sum(dim=-1).clamp(min=1)
    log_sum, mean = state.unbind(dim=-1)
    if isinstance(pooling, LogSumExp):
        return pooling.temperature * log_sum.masked_fill(log_sum == -torch.inf, 0)
    return mean
