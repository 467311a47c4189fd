"""GradCache of a ColBERT: a batch that is embedded in mini-batches, and embedded again with gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from pylate_fastmaxsim.integrations.encoding import encode as encoding_encode
from pylate_fastmaxsim.integrations.encoding.gradcache import CachedCall, with_second_passes
from pylate_fastmaxsim.integrations.models.wrappers import wrapper_attribute
from pylate_fastmaxsim.integrations.pylate.fused_head import unit_embeddings


class CachedBatch:
    """Unit token embeddings of a batch, made without gradients: ``queries`` ``[Nq, Lq, d]``, ``documents`` a TokenBatch.

    While gradients are computed, ``queries`` and ``documents.values`` are leaves: differentiate the loss by them, and
    then return it from :meth:`with_second_passes`.

    ``features`` are the tokenized columns, the queries and then the documents. Give ``mini_batch_size`` or
    ``mini_batch_tokens``, as to ``plan_documents``. ``progress`` goes through the calls of the first pass.
    """

    def __init__(
        self,
        model: nn.Module,
        features: Sequence[dict[str, Tensor]],
        *,
        mini_batch_size: int | None = None,
        mini_batch_tokens: int | None = None,
        progress: Callable[[Sequence[CachedCall]], Iterable[CachedCall]] = iter,
    ) -> None:
        size = {"mini_batch_size": mini_batch_size, "mini_batch_tokens": mini_batch_tokens}
        plan = encoding_encode.plan_documents(model, features[1:], wrapper_attribute(model, "skiplist"), **size)
        query_calls = encoding_encode.query_calls(model, features[0], plan, **size)
        self._model, self._queries = model, len(query_calls)
        self._calls = [CachedCall(partial(unit_embeddings, model, call), call) for call in query_calls + plan.calls]
        embeddings = [call.first() for call in progress(self._calls)]
        self._shapes = [part.shape for part in embeddings]
        self.queries = torch.cat(embeddings[: self._queries])
        self.documents = plan.batch(embeddings[self._queries :])
        del embeddings  # of large batches the most memory, now held once more
        if torch.is_grad_enabled():
            self.queries.requires_grad_()
            self.documents.values.requires_grad_()

    def with_second_passes(self, loss: Tensor) -> Tensor:
        """The loss, whose ``backward()`` embeds the batch again and goes on from the gradients of the leaves."""
        of_queries, of_documents = self._shapes[: self._queries], self._shapes[self._queries :]
        gradients = [*self.queries.grad.split([shape[0] for shape in of_queries])]
        gradients += self.documents.values.grad.split([shape[:-1].numel() for shape in of_documents])
        return with_second_passes(loss, self._model, self._calls, gradients)
