"""ContrastiveDistillation: both losses of one encoding and one scoring, with GradCache if asked for."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pylate_fastmaxsim._checks import require_count
from pylate_fastmaxsim._winners import queries_at_once
from pylate_fastmaxsim.integrations.encoding.gradcache import losses_of_chunks
from pylate_fastmaxsim.integrations.encoding.views import sum_over_views
from pylate_fastmaxsim.integrations.options import current_options
from pylate_fastmaxsim.losses.columns import Features, texts_in
from pylate_fastmaxsim.losses.encode import host_of
from pylate_fastmaxsim.ops.gathered import gather_documents, rank_and_ranks
from pylate_fastmaxsim.ops.pooled import pooled_scores, state_bytes
from pylate_fastmaxsim.pooling import Max
from pylate_fastmaxsim.tokens import TokenBatch


class ContrastiveDistillation(nn.Module):
    """Contrastive loss and distillation of a teacher's scores together, encoded once and scored once.

    ``contrastive_weight * cross_entropy(S / temperature)`` of the first document of each query against all documents of
    the batch, and ``distillation_weight * KL(teacher / teacher_temperature || S / temperature)`` over the documents of
    each query, both as means over the queries; S are MaxSim scores. With ``mini_batch_size`` or ``mini_batch_tokens``
    in one pass of GradCache. The same with and without :func:`~pylate_fastmaxsim.enable`, with which it is
    padding-free, and whose ``pooling`` and ``stock_masking`` apply.

    ``MultiVectorDistillKLDivLoss`` of Sentence Transformers multiplies by the square of its student temperature; here
    both terms have the same factor, whatever the temperature.

    Parameters
    ----------
    model
        A ``pylate.models.ColBERT`` or a ``MultiVectorEncoder`` of Sentence Transformers.
    contrastive_weight, distillation_weight
        Factors of the two terms.
    temperature
        Of the model's scores, in both terms.
    teacher_temperature
        Of the teacher's scores.
    mini_batch_size
        GradCache: texts in a call of the encoder. Without padding a call of a ColBERT holds at most as many tokens as so
        many padded documents.
    mini_batch_tokens
        GradCache, in its place: tokens in a call of the encoder.
    gather_across_devices
        The documents of all processes are negatives of the contrastive term.

    Raises
    ------
    ValueError
        A temperature is not above 0, a size below 1, or both sizes are given.
    TypeError
        A size is no integer, or the model is another.

    Examples
    --------
    With queries, and N documents for each with the teacher's scores, as for PyLate's ``Distillation``; or with columns
    ``query``, ``positive``, ``negative`` and ``label``, a list of N scores::

        loss = ContrastiveDistillation(model, distillation_weight=0.5, temperature=0.5, mini_batch_tokens=16_384)
        trainer = SentenceTransformerTrainer(model=model, args=args, train_dataset=train_dataset, loss=loss, ...)
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        contrastive_weight: float = 1.0,
        distillation_weight: float = 1.0,
        temperature: float = 1.0,
        teacher_temperature: float = 1.0,
        mini_batch_size: int | None = None,
        mini_batch_tokens: int | None = None,
        gather_across_devices: bool = False,
    ) -> None:
        super().__init__()
        where = "ContrastiveDistillation"
        for name, value in (("temperature", temperature), ("teacher_temperature", teacher_temperature)):
            if not 0 < value < math.inf:
                raise ValueError(f"{where}: {name} must be a number above 0, got {value}.")
        for name, size in (("mini_batch_size", mini_batch_size), ("mini_batch_tokens", mini_batch_tokens)):
            if size is not None:
                require_count(where, name, size)
        if mini_batch_size is not None and mini_batch_tokens is not None:
            raise ValueError(f"{where}: give mini_batch_size or mini_batch_tokens, not both.")
        self.model = model
        self.contrastive_weight, self.distillation_weight = contrastive_weight, distillation_weight
        self.temperature, self.teacher_temperature = temperature, teacher_temperature
        self.mini_batch_size, self.mini_batch_tokens = mini_batch_size, mini_batch_tokens
        self.gather_across_devices = gather_across_devices

    @property
    def uses_gradient_cache(self) -> bool:
        """True if the loss differentiates in a hook on what it returns; Sentence Transformers asks its losses."""
        return self.mini_batch_size is not None or self.mini_batch_tokens is not None

    def get_config_dict(self) -> dict[str, object]:
        """The settings, which Sentence Transformers writes in a model card."""
        return {name: value for name, value in vars(self).items() if not name.startswith("_") and name != "training"}

    def forward(self, sentence_features: Iterable[Features], labels: Tensor | None = None) -> Tensor:
        """The loss, a scalar.

        Parameters
        ----------
        sentence_features
            The tokenized columns: B queries, and N documents a query in one column or several, the positive first.
        labels
            The teacher's scores, ``[B, N]``, floating point; not read where ``distillation_weight`` is 0.

        Raises
        ------
        ValueError
            ``labels`` has another shape, or N is 1.
        """
        features = list(sentence_features)
        counts = [texts_in(column) for column in features]
        ways = sum(counts[1:]) / max(1, counts[0])
        if self.distillation_weight and (ways < 2 or labels is None or labels.shape != (counts[0], ways)):
            raise ValueError(
                "ContrastiveDistillation: labels must be the teacher's scores of each query's documents, at least two, "
                f"[B, N] = [{counts[0]}, {ways:g}], got {None if labels is None else tuple(labels.shape)}."
            )
        host = host_of("ContrastiveDistillation", self.model)

        def loss_of(queries: Tensor, mask: Tensor | None, *documents_and_floor) -> Tensor:
            of_mask, of_leaves = partial(self._loss, labels, mask), self.uses_gradient_cache
            return sum_over_views(of_mask, queries, *documents_and_floor, of_leaves=of_leaves)

        if not self.uses_gradient_cache:
            return loss_of(*host.encoded(self.model, features))
        size = {"mini_batch_size": self.mini_batch_size, "mini_batch_tokens": self.mini_batch_tokens}
        return host.cached(self.model, features, loss_of, **size)

    forward.takes_views = True

    def _loss(
        self, labels: Tensor, mask: Tensor | None, queries: Tensor, documents: TokenBatch, zero_floor: Tensor | None
    ) -> Tensor:
        """The loss of embeddings; with GradCache of some queries at a time, which leaves gradients at them."""
        own = torch.arange(len(documents), device=documents.device).view(len(queries), -1)
        if self.gather_across_devices:
            own = own + rank_and_ranks()[0] * len(documents)
            documents, zero_floor = gather_documents(documents, zero_floor)
        dtype = torch.promote_types(queries.dtype, documents.values.dtype)
        options = current_options()
        pooling = Max() if options is None else options.pooling

        def loss_of(chunk: slice, values: Tensor) -> Tensor:
            batch = TokenBatch.from_padded(queries[chunk].to(dtype), None if mask is None else mask[chunk])
            scores = pooled_scores(batch, documents.with_values(values), pooling=pooling, zero_floor=zero_floor)
            scores = scores / self.temperature
            # Not times the number of ranks, as in PyLate: the balance of the terms would depend on it.
            loss = self.contrastive_weight * F.cross_entropy(scores, own[chunk, 0])
            if not self.distillation_weight:
                return loss * (len(batch) / len(queries))
            teacher = F.log_softmax(labels[chunk].detach().to(scores.dtype) / self.teacher_temperature, dim=1)
            student = F.log_softmax(scores.gather(1, own[chunk]), dim=1)
            distillation = F.kl_div(student, teacher, reduction="batchmean", log_target=True)
            return (loss + self.distillation_weight * distillation) * (len(batch) / len(queries))

        if not self.uses_gradient_cache:
            return loss_of(slice(None), documents.values)
        kept = state_bytes(pooling, documents.max_length, documents.values.dtype)
        step = queries_at_once(queries.shape[1], len(documents), kept)
        chunks = (slice(begin, begin + step) for begin in range(0, len(queries), step))
        return torch.stack(losses_of_chunks(documents.values, len(queries), chunks, loss_of)).sum()
