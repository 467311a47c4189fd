"""Queries and documents of a loss of a MultiVectorEncoder in one call of a packed encoder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sentence_transformers.base.modules import Transformer
from sentence_transformers.multi_vector_encoder.losses import (
    MultiVectorDistillKLDivLoss,
    MultiVectorMarginMSELoss,
    MultiVectorMultipleNegativesRankingLoss,
)
from torch import Tensor, nn

from pylate_fastmaxsim.integrations.encoding.batch import Documents, padded_again
from pylate_fastmaxsim.integrations.patching.patches import Patch
from pylate_fastmaxsim.integrations.patching.redirect import detached
from pylate_fastmaxsim.integrations.sentence_transformers.loss_columns import Features, LossColumns, in_force, noting
from pylate_fastmaxsim.ops.score_metric import PooledScores


class Batch(LossColumns):
    """The columns of a loss, and the states of those that are encoded already."""

    def __init__(self, model: nn.Module, columns: Sequence[Features]) -> None:
        super().__init__(model, columns)
        self._encoded: _Encoded | None = None

    def keep(self, transformer: Transformer, documents: Documents, states: Tensor) -> Tensor:
        """Keep the states ``[T, d]`` of all columns for later calls, and return those of the queries, padded."""
        self._encoded = _Encoded(transformer, documents, states, documents.cu_seqlens.tolist(), in_force(states))
        return self._encoded.take(*self.columns[0]["input_ids"].shape)

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
            and self.in_force == in_force(self.states)
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


def patches() -> list[Patch]:
    """What to replace in Sentence Transformers."""
    return [Patch(loss, "forward", noting(detached(loss.forward), Batch, check_metric)) for loss in _LOSSES]


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
