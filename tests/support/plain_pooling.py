"""Pooling in plain PyTorch from similarities that are held: what losses are compared with."""

from __future__ import annotations

import torch
from torch import Tensor

from pylate_fastmaxsim import LogSumExp, Max, Softmax, TopK
from pylate_fastmaxsim.ops.pooled import Pooling

POOLINGS = (TopK(3), Softmax(0.3), LogSumExp(0.1))


def pooled(similarities: Tensor, live: Tensor, pooling: Pooling) -> Tensor:
    """Pool over the last dimension, where ``live``; 0 where nothing is."""
    left_out = similarities.masked_fill(~live, -1e4)
    match pooling:
        case Max():
            values = left_out.amax(-1)
        case TopK(k=k):
            best = left_out.topk(min(k, left_out.shape[-1])).values
            counts = live.sum(-1).clamp(1, k)
            values = best.where(torch.arange(best.shape[-1]) < counts[..., None], 0).sum(-1) / counts
        case Softmax(temperature=temperature):
            values = ((left_out / temperature).softmax(-1) * similarities).sum(-1)
        case LogSumExp(temperature=temperature):
            values = temperature * (left_out / temperature).logsumexp(-1)
    return values.where(live.any(-1), 0)
