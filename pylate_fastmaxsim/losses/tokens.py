"""Fewer tokens of each document: the first ones, or means of neighbours."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from pylate_fastmaxsim._checks import require_count
from pylate_fastmaxsim.integrations.pylate.normalize import unit
from pylate_fastmaxsim.tokens import TokenBatch


def first_tokens(documents: TokenBatch, count: int) -> TokenBatch:
    """The first ``count`` live tokens of each document, without a copy. Waits for no device.

    Raises
    ------
    ValueError
        ``count`` is below 1.
    TypeError
        ``count`` is no integer.

    Examples
    --------
    >>> batch = TokenBatch.from_padded(torch.ones(2, 4, 8), torch.tensor([[0, 1, 1, 1], [1, 0, 0, 0]]))
    >>> first_tokens(batch, 2).lengths.tolist()
    [3, 1]
    """
    count = require_count("first_tokens", "count", count)
    rows, live = _places(documents)
    live = first_live(live, count)
    keep = torch.zeros(len(documents.values) + 1, dtype=torch.bool, device=documents.device)
    # What is not live is written behind the last row. An assignment would copy its value from the host, and wait.
    keep.index_fill_(0, torch.where(live, rows, len(documents.values)).flatten(), True)
    ends = torch.arange(1, documents.max_length + 1, device=documents.device)
    return replace(documents, lengths=(live * ends).amax(dim=1), keep=keep[:-1], gapless=False)


def pooled_tokens(documents: TokenBatch, count: int) -> TokenBatch:
    """At most ``count`` vectors for each document: means of runs of neighbouring live tokens, of unit length.

    A document with n live tokens is divided into ``count`` runs of n / count tokens each, up to rounding; one with no
    more than ``count`` tokens stays as it is. Differentiable, repeatable bit by bit. The same before an index is built
    gives what a model trained with :class:`Matryoshka` and ``pooled=True`` is trained for.

    Raises
    ------
    ValueError
        ``count`` is below 1.
    TypeError
        ``count`` is no integer.

    Examples
    --------
    >>> tokens = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    >>> pooled_tokens(TokenBatch.from_list([tokens, tokens[:1]]), 2).to_padded()[0].tolist()
    [[[1.0, 0.0], [0.0, 1.0]], [[1.0, 0.0], [0.0, 0.0]]]
    """
    count = require_count("pooled_tokens", "count", count)
    rows, live = _places(documents)
    # No document has more, and memory is for as many as are asked for.
    count = min(count, documents.max_length)
    values, live = pool_padded(documents.values[torch.where(live, rows, 0)], live, count)
    return TokenBatch.from_padded(values, live)


def first_live(live: Tensor, count: int) -> Tensor:
    """First ``count`` live places of each row of a mask ``[N, L]`` (bool)."""
    return live & (live.cumsum(dim=1) <= count)


def pool_padded(values: Tensor, live: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """:func:`pooled_tokens` of padded tokens ``[N, L, d]`` with a mask: ``[N, count, d]`` and its mask."""
    tokens = live.sum(dim=1, keepdim=True)
    place = live.cumsum(dim=1) - 1
    run = torch.where(tokens > count, place * count // tokens.clamp(min=1), place)
    runs = torch.arange(count, device=live.device)
    # Products of matrices, because adding into rows would not be repeatable on a GPU.
    member = (run[:, None] == runs[:, None]) & live[:, None]
    sums = member.to(values.dtype) @ values.masked_fill(~live[..., None], 0)
    return unit(sums), runs < tokens


def padded_to(values: Tensor, live: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Tokens ``[N, k, d]`` and their mask with ``length`` places."""
    more = length - values.shape[1]
    return F.pad(values, (0, 0, 0, more)), F.pad(live, (0, more))


def _places(batch: TokenBatch) -> tuple[Tensor, Tensor]:
    """The row of each place of a sequence, ``[N, max_length]``, and whether a live token is there."""
    place = torch.arange(batch.max_length, device=batch.device)
    inside = place < batch.lengths[:, None]
    rows = torch.where(inside, batch.starts[:, None] + place, 0)
    return rows, inside if batch.keep is None else inside & batch.keep[rows]
