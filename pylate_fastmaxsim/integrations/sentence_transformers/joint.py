"""Queries and documents of a loss of Sentence Transformers in one call of a packed encoder.

These losses encode their queries and then their documents. With small batches a GPU waits for the host, which launches
every layer once per call. So the call for the queries encodes the documents as well, and later calls take theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import wraps

import torch
from sentence_transformers.base.modules import Transformer
from sentence_transformers.multi_vector_encoder import MultiVectorEncoder
from sentence_transformers.multi_vector_encoder.losses import (
    MultiVectorDistillKLDivLoss,
    MultiVectorMarginMSELoss,
    MultiVectorMultipleNegativesRankingLoss,
)
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pylate_fastmaxsim.integrations.encoding.batch import Documents, padded_again
from pylate_fastmaxsim.integrations.encoding.modes import MOST_TOKENS_BESIDE_QUERIES
from pylate_fastmaxsim.integrations.models.context import setting
from pylate_fastmaxsim.integrations.models.user_code import has_class_forward, has_user_hooks
from pylate_fastmaxsim.integrations.models.wrappers import layers_of_wrapping
from pylate_fastmaxsim.integrations.options import current_options
from pylate_fastmaxsim.integrations.patching.patches import Patch
from pylate_fastmaxsim.integrations.patching.redirect import detached
from pylate_fastmaxsim.integrations.score_metric import PooledScores

Features = dict[str, Tensor]


class Batch:
    """The columns of a loss, and the states of those that are encoded already."""

    def __init__(self, loss: nn.Module, columns: Sequence[Features]) -> None:
        self._columns = columns
        self._loss = loss
        self._encoded: _Encoded | None = None

    def behind(self, features: Features) -> Sequence[Features]:
        """The columns of documents if ``features`` are the queries, else none."""
        queries = self._columns[0]
        are_queries = all(features.get(key) is queries.get(key) for key in ("input_ids", "attention_mask"))
        return self._columns[1:] if are_queries else ()

    def reason_apart(self, model: MultiVectorEncoder, transformer: Transformer) -> str | None:
        """What may change documents before their own call, so that they must not be encoded earlier."""
        *around, core = layers_of_wrapping(self._loss.model)
        for layer in around:
            if not isinstance(layer, DistributedDataParallel):
                return f"{type(layer).__name__} is around the model"
        if core is not model or next(model.children()) is not transformer:
            return "the model does not begin with the encoder"
        for module, kind in ((model, MultiVectorEncoder), (transformer, Transformer)):
            # A subclass may have a __call__ or a forward of its own.
            if type(module) is not kind:
                return f"{type(module).__name__} is a class of your own"
            if not has_class_forward(module) or has_user_hooks(module):
                return f"a hook or another forward is on {type(module).__name__}"
        return None

    def keep(self, transformer: Transformer, documents: Documents, states: Tensor) -> Tensor:
        """Keep the states ``[T, d]`` of all columns for later calls, and return those of the queries, padded."""
        self._encoded = _Encoded(transformer, documents, states, documents.cu_seqlens.tolist(), _in_force(states))
        return self._encoded.take(*self._columns[0]["input_ids"].shape)

    def take(self, transformer: Transformer, features: Features) -> Tensor | None:
        """States ``[N, L, d]`` of documents that were encoded with the queries."""
        if self._encoded is None:
            return None
        count, width = features["input_ids"].shape
        if not self._encoded.holds(transformer, count, width):
            self._encoded = None
            return None
        return self._encoded.take(count, width)


@dataclass
class _Encoded:
    """States of texts, taken in order, some at a time."""

    transformer: Transformer
    documents: Documents
    states: Tensor
    ends: list[int]
    in_force: tuple[bool, bool]
    taken: int = 0

    def holds(self, transformer: Transformer, count: int, width: int) -> bool:
        ends = self.ends[self.taken : self.taken + count + 1]
        return (
            transformer is self.transformer
            and self.in_force == _in_force(self.states)
            and len(ends) == count + 1
            and all(end - start <= width for start, end in zip(ends, ends[1:], strict=False))
        )

    def take(self, count: int, width: int) -> Tensor:
        start, end = self.ends[self.taken], self.ends[self.taken + count]
        index = self.documents.token_index[start:end] - self.taken * self.documents.max_length
        self.taken += count
        if width != self.documents.max_length:
            index = index // self.documents.max_length * width + index % self.documents.max_length
        return padded_again(self.states[start:end], index, count, width, filler=self.states[:1])


def _in_force(states: Tensor) -> tuple[bool, bool]:
    return torch.is_grad_enabled(), torch.is_autocast_enabled(states.device.type)


_batch: ContextVar[Batch | None] = ContextVar("batch", default=None)


def current() -> Batch | None:
    """The batch of the loss that is running."""
    return _batch.get()


def are_few(texts: Documents) -> bool:
    """Whether there are tokens, but so few that another call would leave a GPU waiting for the host."""
    return 0 < len(texts.token_index) <= MOST_TOKENS_BESIDE_QUERIES


def patches() -> list[Patch]:
    """What to replace in Sentence Transformers."""
    return [Patch(loss, "forward", _noting(detached(loss.forward))) for loss in _LOSSES]


_OF_OWN_DOCUMENTS = (MultiVectorDistillKLDivLoss, MultiVectorMarginMSELoss)
_LOSSES = (MultiVectorMultipleNegativesRankingLoss, *_OF_OWN_DOCUMENTS)


def check_metric(loss: nn.Module) -> None:
    """Raise ValueError where a loss has :class:`PooledScores` that score other documents than it takes.

    A margin of scores against all documents would be broadcast, and give a loss that means nothing.
    """
    metric, own = loss.similarity_fct, isinstance(loss, _OF_OWN_DOCUMENTS)
    if isinstance(metric, PooledScores) and metric.own_documents != own:
        documents = "its own documents" if own else "all documents of the batch"
        raise ValueError(
            f"{type(loss).__name__} scores each query against {documents}, so its similarity_fct must be "
            f"PooledScores(..., own_documents={own}), got {metric}."
        )


def _noting(stock: Callable) -> Callable:
    """The forward of a loss that notes its columns."""

    @wraps(stock)
    def forward(self: nn.Module, sentence_features: Iterable[Features], *args, **kwargs) -> Tensor:
        if torch.compiler.is_compiling() or current_options() is None:
            return stock(self, sentence_features, *args, **kwargs)
        check_metric(self)
        columns = list(sentence_features)
        with setting(_batch, Batch(self, columns)):
            return stock(self, columns, *args, **kwargs)

    return forward
