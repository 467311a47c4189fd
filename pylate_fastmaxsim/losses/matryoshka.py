"""Matryoshka: a loss over fewer dimensions and fewer document tokens of one encoding."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor, nn

from pylate_fastmaxsim._checks import require_count
from pylate_fastmaxsim.integrations.encoding import views as encoding_views
from pylate_fastmaxsim.integrations.models.context import setting
from pylate_fastmaxsim.integrations.models.wrappers import StandIn
from pylate_fastmaxsim.integrations.pylate.normalize import unit
from pylate_fastmaxsim.losses.tokens import first_live, first_tokens, padded_to, pool_padded, pooled_tokens
from pylate_fastmaxsim.ops.pooled import live_counts
from pylate_fastmaxsim.tokens import TokenBatch

Features = dict[str, Tensor]


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
        """Of queries ``[Nq, Lq, d]`` and documents. ``zero_floor`` as in ``maxsim``: a token left out is a masked one."""
        if self.tokens is not None:
            fewer = (pooled_tokens if self.pooled else first_tokens)(documents, self.tokens)
            if zero_floor is not None:
                live = live_counts(documents.starts, documents.lengths, documents.keep)
                zero_floor = zero_floor | (live > self.tokens)
            documents = fewer
        return self._cut(queries), documents.with_values(self._cut(documents.values)), zero_floor

    def of_padded(self, values: Tensor, live: Tensor, are_documents: bool) -> tuple[Tensor, Tensor]:
        """Of one side as ``[N, L, d]`` with a mask ``[N, L]``, in as many places."""
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


class Matryoshka(nn.Module):
    """A loss modifier; see the class of the same name of a library's module."""

    def __init__(
        self,
        model: nn.Module,
        loss: nn.Module,
        dims: Sequence[int] | None = None,
        weights: Sequence[float] | None = None,
        *,
        document_tokens: Sequence[int | None] | None = None,
        token_weights: Sequence[float] | None = None,
        pooled: bool = False,
    ) -> None:
        super().__init__()
        if not dims and not document_tokens:
            raise ValueError("Matryoshka: give dims, document_tokens or both.")
        if not hasattr(loss, "model"):
            raise ValueError(
                f"Matryoshka: {type(loss).__name__} has no self.model, so that its embeddings cannot be cut."
            )
        self.model, self.loss, self.pooled = model, loss, pooled
        self.dims, self.weights = _weighted("dims", dims, "weights", weights)
        self.document_tokens, self.token_weights = _weighted(
            "document_tokens", document_tokens, "token_weights", token_weights
        )
        self.views = [
            View(of_dim * of_tokens, dim, tokens, pooled)
            for (dim, of_dim), (tokens, of_tokens) in product(
                zip(self.dims, self.weights, strict=True), zip(self.document_tokens, self.token_weights, strict=True)
            )
        ]

    @property
    def uses_gradient_cache(self) -> bool:
        """Whether the loss differentiates in a hook on what it returns; Sentence Transformers asks its losses."""
        return getattr(self.loss, "uses_gradient_cache", False)

    def get_config_dict(self) -> dict[str, object]:
        """The settings, which Sentence Transformers writes in a model card."""
        names = "dims", "weights", "document_tokens", "token_weights", "pooled"
        return {"loss": type(self.loss).__name__, **{name: getattr(self, name) for name in names}}

    def forward(self, sentence_features: Iterable[Features], labels: Tensor | None = None) -> Tensor:
        """The weighted sum of the loss over all combinations of ``dims`` and ``document_tokens``, a scalar."""
        features = list(sentence_features)
        # As our losses and, with the flag, PyLate's: they take the views of what they encode.
        # Not inside of another Matryoshka, whose view its stand-in gives them.
        if getattr(type(self.loss).forward, "takes_views", False) and not isinstance(self.loss.model, StandIn):
            with setting(encoding_views.current, self):
                return self.loss(features, labels)
        return self.of_stock(self.loss, features, labels)

    def of_stock(self, stock: Callable[..., Tensor], features: list[Features], *labels, **named_labels) -> Tensor:
        """The sum for a loss that knows no views. ``stock`` calls it."""
        if hasattr(self.loss, "calculate_loss"):
            with self._calculating():
                return stock(features, *labels, **named_labels)
        # It encodes again in backward(), when no view stands for its model any more.
        if any(
            getattr(each, "uses_gradient_cache", False) or hasattr(each, "calculate_loss")
            for each in self.loss.modules()
        ):
            raise ValueError(
                f"Matryoshka: {type(self.loss).__name__} cannot be cut, because it has GradCache inside of it or in a subclass "
                "with a forward of its own; give the loss with GradCache to one Matryoshka itself."
            )
        return self._of_answers(stock, features, *labels, **named_labels)

    def _of_answers(self, stock: Callable[..., Tensor], features: list[Features], *labels, **named_labels) -> Tensor:
        """The sum for a loss that calls its model and scores, once for each view."""
        raise NotImplementedError

    def _masks_of(self, column: list[Tensor], masks: list[Tensor] | Tensor) -> list[Tensor]:
        """Masks of the mini-batches of a column, as ``calculate_loss`` of GradCache is given them."""
        raise NotImplementedError

    def _masks_for(self, masks: list[Tensor]) -> list[Tensor] | Tensor:
        """And back."""
        raise NotImplementedError

    @contextmanager
    def _calculating(self) -> Iterator[None]:
        """Context in which a loss with GradCache sums over the views of embeddings that it made."""
        stock = self.loss.calculate_loss

        def calculate_loss(embeddings, masks, *args, with_backward: bool = False) -> Tensor:
            masks = [self._masks_of(*column) for column in zip(embeddings, masks, strict=True)]
            total = 0.0
            for view in self.views:
                seen = [
                    [view.of_padded(*part, are_documents=index > 0) for part in zip(*column, strict=True)]
                    for index, column in enumerate(zip(embeddings, masks, strict=True))
                ]
                cut = [[values for values, _ in column] for column in seen]
                leaves = [[values.detach().requires_grad_(with_backward) for values in column] for column in cut]
                of_columns = [self._masks_for([mask for _, mask in column]) for column in seen]
                total = total + view.weight * stock(leaves, of_columns, *args, with_backward=with_backward)
                if with_backward:
                    pairs = [pair for each in zip(cut, leaves, strict=True) for pair in zip(*each, strict=True)]
                    torch.autograd.backward(
                        [values for values, _ in pairs], [view.weight * leaf.grad for _, leaf in pairs]
                    )
            return total

        vars(self.loss)["calculate_loss"] = calculate_loss
        try:
            yield
        finally:
            del vars(self.loss)["calculate_loss"]


@contextmanager
def answering(loss: nn.Module, answer: Callable) -> Iterator[None]:
    """Context in which ``answer`` stands for the model of a loss, and of the losses inside of it.

    Raises
    ------
    ValueError
        The loss did not ask it, so that it has computed with other embeddings.
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


def _weighted(
    name: str, values: Sequence[int | None] | None, weights_name: str, weights: Sequence[float] | None
) -> tuple[tuple[int | None, ...], tuple[float, ...]]:
    values = tuple(
        None if value is None else require_count("Matryoshka", f"each of {name}", value) for value in values or (None,)
    )
    weights = (1.0,) * len(values) if weights is None else tuple(weights)
    if len(weights) != len(values):
        raise ValueError(
            f"Matryoshka: {weights_name} must be one number for each of {name}, got {len(weights)} for {len(values)}."
        )
    return values, weights
