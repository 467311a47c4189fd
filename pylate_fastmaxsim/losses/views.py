"""Fewer dimensions and tokens of one encoding, and the models that return them to a loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor, nn

from pylate_fastmaxsim.integrations.models.wrappers import StandIn
from pylate_fastmaxsim.integrations.pylate.normalize import unit
from pylate_fastmaxsim.losses.tokens import first_live, first_tokens, padded_to, pool_padded, pooled_tokens
from pylate_fastmaxsim.ops.pooled import live_counts
from pylate_fastmaxsim.tokens import TokenBatch


@dataclass(frozen=True)
class View:
    """The first ``dim`` dimensions of each token, renormalised, and so many tokens of each document; None: all."""

    weight: float
    dim: int | None
    tokens: int | None
    pooled: bool

    def of(
        self, queries: Tensor, documents: TokenBatch, zero_floor: Tensor | None
    ) -> tuple[Tensor, TokenBatch, Tensor | None]:
        """View of queries ``[Nq, Lq, d]`` and documents. ``zero_floor`` as in ``maxsim``: a token left out is a masked one."""
        if self.tokens is not None:
            fewer = (pooled_tokens if self.pooled else first_tokens)(documents, self.tokens)
            if zero_floor is not None:
                live = live_counts(documents.starts, documents.lengths, documents.keep)
                zero_floor = zero_floor | (live > self.tokens)
            documents = fewer
        return self._cut(queries), documents.with_values(self._cut(documents.values)), zero_floor

    def of_padded(self, values: Tensor, live: Tensor, are_documents: bool) -> tuple[Tensor, Tensor]:
        """View of one side as ``[N, L, d]`` with a mask ``[N, L]``, in as many places."""
        if are_documents and self.tokens is not None:
            if self.pooled:
                length = live.shape[1]
                values, live = padded_to(*pool_padded(values, live, min(self.tokens, length)), length)
            else:
                live = first_live(live, self.tokens)
        return self._cut(values), live

    def _cut(self, values: Tensor) -> Tensor:
        if self.dim is None:
            return values
        if self.dim > values.shape[-1]:
            raise ValueError(
                f"Matryoshka: dims must be at most the {values.shape[-1]} dimensions of the model's embeddings, "
                f"got {self.dim}."
            )
        return unit(values[..., : self.dim])


@contextmanager
def replaced_model(loss: nn.Module, answer: Callable) -> Iterator[None]:
    """Context in which ``answer`` stands for the model of a loss, and of the losses inside of it.

    ValueError if the loss did not ask it, so that it has computed with other embeddings.
    """
    model, asked = loss.model, []

    def asking(*args, **kwargs):
        asked.append(None)
        return answer(*args, **kwargs)

    holders = list(_holders(loss, model))
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


def _holders(loss: nn.Module, model: nn.Module) -> Iterator[nn.Module]:
    if getattr(loss, "model", None) is model:
        yield loss
    for child in loss.children():
        if child is not model:
            yield from _holders(child, model)
