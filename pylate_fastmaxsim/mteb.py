"""Retrieval tasks of mteb (release 2), searched exactly."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor

from pylate_fastmaxsim.recipes.models.retriever import (
    BATCHES_AT_ONCE,
    Encoded,
    MultiVectorRetriever,
    SparseRetriever,
    retriever_of,
)

# As mteb has it where encode_kwargs do not say.
_BATCH_SIZE = 32

# The best documents of each query with their scores, by their ids.
Results = dict[str, dict[str, float]]


class ExactSearch:
    """A late-interaction or sparse model that ``mteb.evaluate`` searches and reranks with, without an index.

    Documents are encoded in batches, scored as they come and dropped. Texts are those that mteb makes of titles,
    instructions and conversations; prompts of the model that are named after a task or a type of task apply to it. With
    ``pylate_fastmaxsim.enable()`` before, the texts are encoded without padding. A sparse model does not find documents
    that share no term with a query.

    mteb keeps these results apart from those of its own search, which is PLAID for PyLate, by ``experiment_kwargs``.

    Parameters
    ----------
    model
        A ColBERT of PyLate, or a MultiVectorEncoder or SparseEncoder of Sentence Transformers.

    Raises
    ------
    TypeError
        ``model`` is another.

    Examples
    --------
    >>> ExactSearch("colbert-ir/colbertv2.0")
    Traceback (most recent call last):
        ...
    TypeError: ExactSearch: model must be a ColBERT of PyLate, a MultiVectorEncoder or a SparseEncoder, got str.
    """

    def __init__(self, model: Any) -> None:
        self._retriever = retriever_of(model)
        is_colbert = isinstance(model, getattr(sys.modules.get("pylate.models"), "ColBERT", ()))
        if not is_colbert and type(self._retriever) not in (MultiVectorRetriever, SparseRetriever):
            raise TypeError(
                "ExactSearch: model must be a ColBERT of PyLate, a MultiVectorEncoder or a SparseEncoder, got "
                f"{type(model).__name__}."
            )
        from mteb.models import ModelMeta

        card, is_sparse = model.model_card_data, isinstance(self._retriever, SparseRetriever)
        self.mteb_model_meta = ModelMeta.create_empty(
            {
                "name": card.model_name or card.base_model,
                "revision": card.base_model_revision,
                "model_type": ["sparse" if is_sparse else "late-interaction"],
                "framework": ["PyLate" if is_colbert else "Sentence Transformers", "PyTorch"],
                "experiment_kwargs": {"search": "exact"},
            }
        )

    def index(self, corpus: Dataset, **_: Any) -> None:
        """Keep the corpus, a data set with ``id``, ``text`` and perhaps ``title``, for :meth:`search`."""
        self._corpus = corpus

    def search(
        self,
        queries: Dataset,
        *,
        task_metadata: Any,
        top_k: int,
        encode_kwargs: Mapping[str, Any],
        top_ranked: Mapping[str, Sequence[str]] | None = None,
        num_proc: int | None = None,
        **_: Any,
    ) -> Results:
        """The ``top_k`` best documents of each query, or of its ``top_ranked`` ones."""

        def encoded(texts: Dataset, role: str, size: int) -> Iterator[Encoded]:
            return self._encoded(texts, role, size, task_metadata, dict(encode_kwargs), num_proc)

        ids, names = list(self._corpus["id"]), list(queries["id"])
        (asked,) = encoded(queries, "query", len(names))
        if top_ranked is None:
            size = BATCHES_AT_ONCE * encode_kwargs.get("batch_size", _BATCH_SIZE)
            found = self._retriever.search(asked, encoded(self._corpus, "document", size), top_k)
            return dict(zip(names, _scores_by_id(ids, *found), strict=True))
        results: Results = {query: {} for query in names}
        rows = {
            name: row for row, name in enumerate(dict.fromkeys(chain(*(top_ranked.get(query, ()) for query in names))))
        }
        if not rows:
            return results
        places = {name: place for place, name in enumerate(ids)}
        # In one batch, of which each query has documents of its own.
        (documents,) = encoded(self._corpus.select([places[name] for name in rows]), "document", len(rows))
        for number, query in enumerate(names):
            if own := list(top_ranked.get(query, ())):
                of_query = asked.select(torch.tensor([number], device=asked.device))
                candidates = documents.select(torch.tensor([rows[name] for name in own], device=documents.device))
                found = self._retriever.search(of_query, [candidates], top_k)
                (results[query],) = _scores_by_id(own, *found)
        return results

    def _encoded(
        self, texts: Dataset, role: str, size: int, task: Any, options: dict[str, Any], num_proc: int | None
    ) -> Iterator[Encoded]:
        """Texts of a ``role``, "query" or "document", as they are asked for, in batches of a ``size``."""
        from mteb._create_dataloaders import create_dataloader
        from mteb.models.abs_encoder import get_prompt
        from mteb.types import PromptType

        prompt_type = PromptType(role)
        prompt = get_prompt(self._retriever.model.prompts, task, prompt_type)
        batch_size, progress = options.pop("batch_size", _BATCH_SIZE), options.pop("show_progress_bar", False)
        loader = create_dataloader(
            texts, task_metadata=task, prompt_type=prompt_type, batch_size=size, num_proc=num_proc
        )
        for batch in loader:
            yield self._retriever.encode(batch["text"], batch_size, role == "query", progress, prompt=prompt, **options)


def _scores_by_id(ids: Sequence[str], scores: Tensor, positions: Tensor) -> list[dict[str, float]]:
    """Of each query the scores of documents by their ids. A position of -1 is no document, as sparse search has."""
    return [
        {ids[place]: score for place, score in zip(*row, strict=True) if place >= 0}
        for row in zip(positions.tolist(), scores.tolist(), strict=True)
    ]
