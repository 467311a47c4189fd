"""Gathers the documents of all ranks, with gradients."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from pylate_fastmaxsim._dtypes import sum_dtype
from pylate_fastmaxsim.ops.distributed.layout import describe, rank_and_ranks
from pylate_fastmaxsim.tokens import TokenBatch


def gather_documents(documents: TokenBatch, zero_floor: Tensor | None = None) -> tuple[TokenBatch, Tensor | None]:
    """The documents of all ranks of the default process group, those of rank 0 first, and their ``zero_floor``.

    The gradient of a document is the sum over all ranks, in float32 (float64 for float64 vectors). Every rank must take
    part, also in the backward. Waits for the other ranks once, not for the device.

    Parameters
    ----------
    documents
        The documents of this rank. Their number is the same on all ranks, their lengths are not.
    zero_floor
        As in :func:`~pylate_fastmaxsim.maxsim`, ``[Nd]``, bool; on all ranks or on none.

    Returns
    -------
    documents
        Those of all R ranks, ``R * Nd``. Their vectors are a copy unless there is one rank.
    zero_floor
        ``[R * Nd]``, bool, or ``None`` if none was given.

    Raises
    ------
    ValueError
        The ranks differ in the number of documents, in d, in dtype or in whether there is a ``zero_floor``.
    """
    _, ranks = rank_and_ranks()
    if ranks == 1:
        return documents, zero_floor
    shards = describe(documents, zero_floor)
    most = shards.keep.shape[1]
    first = torch.arange(ranks, device=documents.device)[:, None] * most
    batch = TokenBatch(
        _Gather.apply(documents.values, most),
        (shards.starts + first).flatten(),
        shards.lengths.flatten(),
        max(shards.max_lengths),
        shards.keep.flatten(),
    )
    return batch, None if shards.zero_floor is None else shards.zero_floor.flatten()


class _Gather(torch.autograd.Function):
    """The rows of all ranks, ``[R * most, d]``, gathered into one tensor without another copy."""

    @staticmethod
    def forward(ctx, values, most):
        _, ranks = rank_and_ranks()
        ctx.rows, ctx.dtype = len(values), values.dtype
        gathered = values.new_empty((ranks * most, values.shape[1]))
        dist.all_gather_into_tensor(gathered, F.pad(values, (0, 0, 0, most - len(values))).contiguous())
        return gathered

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        _, ranks = rank_and_ranks()
        gradient = gradient.to(sum_dtype(gradient.dtype)).contiguous()
        own = gradient.new_empty((len(gradient) // ranks, gradient.shape[1]))
        dist.reduce_scatter_tensor(own, gradient)
        return own[: ctx.rows].to(ctx.dtype), None
