"""Token embeddings of unit length, straight in the dtype that they are scored in."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

# Rows that the backward converts to float32 at once.
_ROWS = 2**15
# The eps of torch.nn.functional.normalize.
_SHORTEST = 1e-12


def unit(embeddings: Tensor) -> Tensor:
    """Token embeddings ``[..., d]`` divided by their length, as stock PyLate divides them.

    Under autocast stock makes a float32 copy, which scoring then rounds to the autocast dtype. Here the same quotient,
    computed in float32, is rounded where it is made, and neither it nor its gradient is ever held in float32.

    Examples
    --------
    >>> with torch.autocast("cpu", torch.bfloat16):
    ...     unit(torch.tensor([[3.0, 4.0]]))
    tensor([[0.6016, 0.8008]], dtype=torch.bfloat16)
    >>> unit(torch.tensor([[3.0, 4.0]]))
    tensor([[0.6000, 0.8000]])
    """
    device = embeddings.device.type
    if not torch.is_autocast_enabled(device) or embeddings.dtype == torch.float64:
        return F.normalize(embeddings, p=2, dim=-1)
    return _Unit.apply(embeddings, torch.get_autocast_dtype(device))


class _Unit(torch.autograd.Function):
    @staticmethod
    def forward(ctx, embeddings, dtype):
        length = torch.linalg.vector_norm(embeddings, dim=-1, keepdim=True, dtype=torch.float32)
        result = torch.empty(embeddings.shape, dtype=dtype, device=embeddings.device)
        # Into `out`, a GPU rounds each quotient as it stores it.
        torch.div(embeddings, length.clamp_min(_SHORTEST), out=result)
        ctx.save_for_backward(embeddings, length)
        return result

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        embeddings, length = ctx.saved_tensors
        result = torch.empty_like(embeddings, memory_format=torch.contiguous_format)
        columns = embeddings.shape[-1]
        rows = (tensor.reshape(-1, tensor.shape[-1]).split(_ROWS) for tensor in (gradient, embeddings, length))
        for into, by, values, size in zip(result.view(-1, columns).split(_ROWS), *rows, strict=True):
            by, values = by.float(), values.float()
            # Of a vector shorter than the bound the length is a constant.
            along = (by * values).sum(dim=-1, keepdim=True) / size.square()
            along.masked_fill_(size < _SHORTEST, 0.0)
            into.copy_((by - along * values) / size.clamp_min(_SHORTEST))
        return result, None
