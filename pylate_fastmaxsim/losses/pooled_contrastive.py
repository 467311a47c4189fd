"""PooledContrastive: a contrastive loss against documents as they are and as token pooling leaves them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from pylate_fastmaxsim.losses.contrastive_distillation import ContrastiveDistillation
from pylate_fastmaxsim.losses.matryoshka import Matryoshka


class PooledContrastive(Matryoshka):
    """The contrastive loss against full and pooled documents of one encoding, for an index with fewer vectors.

    The weighted sum over ``factors`` of ``cross_entropy(S / temperature)`` of the first document of each query against all
    documents of the batch, a mean over the queries; S are MaxSim scores with documents pooled by the factor, as the model's
    library pools them when it encodes (:func:`~pylate_fastmaxsim.pool_tokens`). Clusters are constants, and gradients go
    through their means. :class:`Matryoshka` with ``pool_factors`` is the same around any other loss.

    Parameters
    ----------
    model
        A ``pylate.models.ColBERT`` or a ``MultiVectorEncoder`` of Sentence Transformers.
    factors
        Tokens per vector of a pooled document, each at least 1; 1 does not pool.
    weights
        One for each of ``factors``; ``None``: 1.
    temperature, mini_batch_size, mini_batch_tokens, gather_across_devices
        As in :class:`ContrastiveDistillation`. Documents are pooled before they are gathered.

    Raises
    ------
    ValueError
        There is no factor, one is below 1, weights differ in number, or as in :class:`ContrastiveDistillation`.
    TypeError
        A factor is no number, or as in :class:`ContrastiveDistillation`.

    Examples
    --------
    With queries and their positives, and perhaps negatives::

        loss = PooledContrastive(model, factors=(1, 2, 4), weights=(1.0, 0.5, 0.5), mini_batch_tokens=16_384)
        trainer = SentenceTransformerTrainer(model=model, args=args, train_dataset=train_dataset, loss=loss, ...)
    """

    def __init__(
        self,
        model: nn.Module,
        factors: Sequence[float] = (1, 2, 4),
        weights: Sequence[float] | None = None,
        *,
        temperature: float = 1.0,
        mini_batch_size: int | None = None,
        mini_batch_tokens: int | None = None,
        gather_across_devices: bool = False,
    ) -> None:
        contrastive = ContrastiveDistillation(
            model,
            distillation_weight=0.0,
            temperature=temperature,
            mini_batch_size=mini_batch_size,
            mini_batch_tokens=mini_batch_tokens,
            gather_across_devices=gather_across_devices,
        )
        super().__init__(model, contrastive, pool_factors=factors, pool_weights=weights)

    def get_config_dict(self) -> dict[str, object]:
        """The settings, which Sentence Transformers writes in a model card."""
        names = "temperature", "mini_batch_size", "mini_batch_tokens", "gather_across_devices"
        own = {"factors": self.pool_factors, "weights": self.pool_weights}
        return own | {name: getattr(self.loss, name) for name in names}
