"""All columns of a loss of a SparseEncoder in one call of a packed encoder, its head and ``splade_pool``."""

from __future__ import annotations

from collections.abc import Sequence

from sentence_transformers.sparse_encoder.losses import SpladeLoss
from torch import Tensor, nn

from pylate_fastmaxsim.integrations.patching.patches import Patch
from pylate_fastmaxsim.integrations.patching.redirect import detached
from pylate_fastmaxsim.integrations.sentence_transformers.loss_columns import Features, LossColumns, in_force, noting


class Batch(LossColumns):
    """The columns of a loss, and the embeddings of those that have not been asked for."""

    def __init__(self, model: nn.Module, columns: Sequence[Features]) -> None:
        super().__init__(model, columns)
        self._left: list[Features] = []
        self._embeddings: Tensor | None = None

    def keep(self, transformer: nn.Module, embeddings: Tensor) -> Tensor:
        """Keep the embeddings ``[N, V]`` of all columns for later calls, and return those of the first."""
        self._left, self._embeddings = list(self.columns), embeddings
        self._made = transformer, *in_force(embeddings)
        return self._next(1)

    def take(self, transformer: nn.Module, features: Features) -> Tensor | None:
        """Embeddings of the next column, or of all others merged into one, as releases from 6 on do."""
        if not self._left:
            return None
        if self._made == (transformer, *in_force(self._embeddings)):
            ids = [column["input_ids"] for column in self._left]
            if features["input_ids"] is ids[0]:
                return self._next(1)
            if features["input_ids"].shape == (sum(map(len, ids)), max(each.shape[1] for each in ids)):
                return self._next(len(ids))
        self._left, self._embeddings = [], None
        return None

    def _next(self, columns: int) -> Tensor:
        count = sum(len(column["input_ids"]) for column in self._left[:columns])
        # Not slices: the backward of each would be as large as all embeddings.
        taken, self._embeddings = self._embeddings.split([count, len(self._embeddings) - count])
        del self._left[:columns]
        return taken


def patches() -> list[Patch]:
    """What to replace in Sentence Transformers."""
    return [Patch(SpladeLoss, "forward", noting(detached(SpladeLoss.forward), Batch))]
