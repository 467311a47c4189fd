"""Matryoshka: a loss over fewer dimensions, fewer document tokens and pooled documents of one encoding."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product

import torch
from torch import Tensor, nn

from pylate_fastmaxsim._checks import require_count
from pylate_fastmaxsim.integrations.encoding import views as encoding_views
from pylate_fastmaxsim.integrations.models.context import setting
from pylate_fastmaxsim.integrations.models.wrappers import StandIn
from pylate_fastmaxsim.losses.columns import Features
from pylate_fastmaxsim.losses.encode import host_of
from pylate_fastmaxsim.losses.views import View
from pylate_fastmaxsim.ops.token_pooling import require_factor


class Matryoshka(nn.Module):
    """A loss over fewer dimensions, and over fewer tokens of each document, of one encoding.

    The weighted sum of the loss of all combinations of ``dims``, ``document_tokens`` and ``pool_factors``. Inside may be
    the losses of the model's library, :class:`ContrastiveDistillation`, and a loss of your own that calls ``self.model``:
    of a ColBERT once with each column in order, with masks from the columns as in PyLate's; of a MultiVectorEncoder with
    token embeddings and masks from what it returns. With :func:`~pylate_fastmaxsim.enable` losses are as fast inside as
    outside.

    Parameters
    ----------
    model
        A ``pylate.models.ColBERT`` or a ``MultiVectorEncoder`` of Sentence Transformers.
    loss
        The loss, with the same model.
    dims
        Numbers of leading dimensions, of which embeddings are renormalised. ``None``: all dimensions only.
    weights
        One for each of ``dims``; ``None``: 1.
    document_tokens
        How many tokens of each document to score, each number from 1; ``None`` among them: all.
    token_weights
        One for each of ``document_tokens``; ``None``: 1.
    pooled
        Take not the first tokens of a document but so many means of neighbours
        (:func:`~pylate_fastmaxsim.losses.views.pooled_tokens`).
    pool_factors
        By how much to pool these tokens as the model's library does when it encodes with a ``pool_factor``
        (:func:`~pylate_fastmaxsim.pool_tokens`), each at least 1; 1 does not pool. Clusters are constants, and gradients go
        through their means. ``None``: 1 only.
    pool_weights
        One for each of ``pool_factors``; ``None``: 1.

    Raises
    ------
    ValueError
        None of ``dims``, ``document_tokens`` and ``pool_factors`` is given, a number is below 1, weights differ in number, or
        the loss has no ``model``. In ``forward``: one of ``dims`` is larger than the model's.
    TypeError
        One of ``dims`` or ``document_tokens`` is no integer, one of ``pool_factors`` no number, or the model is another.

    Examples
    --------
    Four losses of one encoding::

        loss = losses.CachedContrastive(model, mini_batch_size=32)
        loss = Matryoshka(model, loss, dims=(128, 64), document_tokens=(None, 32), pooled=True)
    """

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
        pool_factors: Sequence[float] | None = None,
        pool_weights: Sequence[float] | None = None,
    ) -> None:
        super().__init__()
        if not dims and not document_tokens and not pool_factors:
            raise ValueError("Matryoshka: give dims, document_tokens or pool_factors.")
        if not hasattr(loss, "model"):
            raise ValueError(
                f"Matryoshka: {type(loss).__name__} has no self.model, so that its embeddings cannot be cut."
            )
        self.model, self.loss, self.pooled = model, loss, pooled
        self.dims, self.weights = self._weighted("dims", dims, weights)
        self.document_tokens, self.token_weights = self._weighted("document_tokens", document_tokens, token_weights)
        self.pool_factors, self.pool_weights = self._weighted("pool_factors", pool_factors or (1,), pool_weights)
        unit_means = host_of(type(self).__name__, model).UNIT_MEANS
        self.views = [
            View(of_dim * of_tokens * of_factor, dim, tokens, pooled, factor, unit_means)
            for (dim, of_dim), (tokens, of_tokens), (factor, of_factor) in product(
                zip(self.dims, self.weights, strict=True),
                zip(self.document_tokens, self.token_weights, strict=True),
                zip(self.pool_factors, self.pool_weights, strict=True),
            )
        ]

    @property
    def uses_gradient_cache(self) -> bool:
        """True if the loss differentiates in a hook on what it returns; Sentence Transformers asks its losses."""
        return getattr(self.loss, "uses_gradient_cache", False)

    def get_config_dict(self) -> dict[str, object]:
        """The settings, which Sentence Transformers writes in a model card."""
        names = "dims", "weights", "document_tokens", "token_weights", "pooled", "pool_factors", "pool_weights"
        return {"loss": type(self.loss).__name__, **{name: getattr(self, name) for name in names}}

    def forward(self, sentence_features: Iterable[Features], labels: Tensor | None = None) -> Tensor:
        """The weighted sum of the loss over all combinations, a scalar."""
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

        def loss_of(columns: list[Features]) -> Tensor:
            return stock(columns, *labels, **named_labels)

        return host_of("Matryoshka", self.model).sum_of_answers(self.loss, self.views, features, loss_of)

    @contextmanager
    def _calculating(self) -> Iterator[None]:
        """Context in which a loss with GradCache sums over the views of embeddings that it made."""
        stock = self.loss.calculate_loss

        def calculate_loss(embeddings, masks, *args, with_backward: bool = False) -> Tensor:
            # PyLate gives one mask for all mini-batches of a column, Sentence Transformers a mask for each.
            joined = isinstance(masks[0], Tensor)
            if joined:
                sizes = [[len(part) for part in column] for column in embeddings]
                masks = [mask.split(of_column) for mask, of_column in zip(masks, sizes, strict=True)]
            total = 0.0
            for view in self.views:
                seen = [
                    [view.of_padded(*part, are_documents=index > 0) for part in zip(*column, strict=True)]
                    for index, column in enumerate(zip(embeddings, masks, strict=True))
                ]
                cut = [[values for values, _ in column] for column in seen]
                leaves = [[values.detach().requires_grad_(with_backward) for values in column] for column in cut]
                of_columns = [[mask for _, mask in column] for column in seen]
                of_columns = [torch.cat(each) for each in of_columns] if joined else of_columns
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

    def _weighted(
        self, name: str, values: Sequence[float | None] | None, weights: Sequence[float] | None
    ) -> tuple[tuple[float | None, ...], tuple[float, ...]]:
        where, what = type(self).__name__, f"each of {name}"
        require = require_factor if name == "pool_factors" else require_count
        values = tuple(None if value is None else require(where, what, value) for value in values or (None,))
        weights = (1.0,) * len(values) if weights is None else tuple(weights)
        if len(weights) != len(values):
            raise ValueError(f"{where}: give one weight for {what}, got {len(weights)} for {len(values)}.")
        return values, weights
