"""Fewer dimensions and tokens of one encoding, and the models that return them to a loss.

The tokens are the first ones of each document, means of neighbours, or means of Ward's clusters.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pylate_fastmaxsim._checks import require_count
from pylate_fastmaxsim.integrations.encoding.plans import unit
from pylate_fastmaxsim.integrations.models.wrappers import StandIn
from pylate_fastmaxsim.ops.pooled import live_counts
from pylate_fastmaxsim.ops.token_pooling import pool_tokens
from pylate_fastmaxsim.tokens import TokenBatch


@dataclass(frozen=True)
class View:
    """The first ``dim`` dimensions of each token, renormalised, and so many tokens of each document; None: all.

    Of these tokens one in ``factor`` is left by ``pool_tokens``, with the first protected and means as the host has them.
    """

    weight: float
    dim: int | None
    tokens: int | None
    pooled: bool
    factor: float = 1
    unit_means: bool = False

    def of(
        self, queries: Tensor, documents: TokenBatch, zero_floor: Tensor | None
    ) -> tuple[Tensor, TokenBatch, Tensor | None]:
        """View of queries ``[Nq, Lq, d]`` and documents. ``zero_floor`` as in ``maxsim``: a token left out is a masked one."""
        seen = self._of_documents(documents)
        if zero_floor is not None:
            before, after = (live_counts(each.starts, each.lengths, each.keep) for each in (documents, seen))
            zero_floor = zero_floor | (before > after)
        return self._cut(queries), seen, zero_floor

    def of_padded(self, values: Tensor, live: Tensor, are_documents: bool) -> tuple[Tensor, Tensor]:
        """View of one side as ``[N, L, d]`` with a mask ``[N, L]``, in as many places."""
        if not are_documents or (self.tokens is None and self.factor == 1):
            return self._cut(values), live
        places = live.shape[1]
        values, live = self._of_documents(TokenBatch.from_padded(values, live)).to_padded()
        more = places - live.shape[1]
        return F.pad(values, (0, 0, 0, more)), F.pad(live, (0, more))

    def _of_documents(self, documents: TokenBatch) -> TokenBatch:
        if self.tokens is not None:
            documents = (pooled_tokens if self.pooled else first_tokens)(documents, self.tokens)
        documents = documents.with_values(self._cut(documents.values))
        if self.factor == 1:
            return documents
        return pool_tokens(documents, self.factor, protected=1, normalize=self.unit_means)

    def _cut(self, values: Tensor) -> Tensor:
        if self.dim is None:
            return values
        if self.dim > values.shape[-1]:
            raise ValueError(
                f"Matryoshka: dims must be at most the {values.shape[-1]} dimensions of the model's embeddings, "
                f"got {self.dim}."
            )
        return unit(values[..., : self.dim])


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
    place = torch.arange(documents.max_length, device=documents.device)
    live = place < documents.lengths[:, None]
    rows = torch.where(live, documents.starts[:, None] + place, 0)
    if documents.keep is not None:
        live = live & documents.keep[rows]
    live = live & (live.cumsum(dim=1) <= count)
    keep = torch.zeros(len(documents.values) + 1, dtype=torch.bool, device=documents.device)
    # What is not live is written behind the last row. An assignment would copy its value from the host, and wait.
    keep.index_fill_(0, torch.where(live, rows, len(documents.values)).flatten(), True)
    return replace(documents, lengths=(live * (place + 1)).amax(dim=1), keep=keep[:-1], gapless=False)


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
    # No document has more, and memory is for as many as are asked for.
    count = min(require_count("pooled_tokens", "count", count), documents.max_length)
    values, live = documents.to_padded()
    tokens = live.sum(dim=1, keepdim=True)
    place = live.cumsum(dim=1) - 1
    run = torch.where(tokens > count, place * count // tokens.clamp(min=1), place)
    runs = torch.arange(count, device=live.device)
    # Products of matrices, because adding into rows would not be repeatable on a GPU.
    member = (run[:, None] == runs[:, None]) & live[:, None]
    return TokenBatch.from_padded(unit(member.to(values.dtype) @ values), runs < tokens)


@contextmanager
def replaced_model(loss: nn.Module, answer: Callable) -> Iterator[None]:
    """Context in which ``answer`` stands for the model of a loss, and of the losses inside of it.

    ValueError if the loss did not ask it, so that it has computed with other embeddings.
    """
    model, asked = loss.model, []

    def asking(*args, **kwargs):
        asked.append(None)
        return answer(*args, **kwargs)

    holders = [module for module in loss.modules() if getattr(module, "model", None) is model]
    for holder in holders:
        holder.model = StandIn(model, asking)
    try:
        yield
    finally:
        for holder in holders:
            holder.model = model
    if not asked:
        raise ValueError(
            f"Matryoshka: {type(loss).__name__} does not call self.model, so its embeddings cannot be cut."
        )
