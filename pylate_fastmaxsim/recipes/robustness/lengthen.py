"""Documents of several lengths: text appended and encoded again, or embeddings of the tokens of other documents."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from pylate_fastmaxsim.diagnostics.robustness import draw_fillers, lengthened
from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.models.encoder import positions
from pylate_fastmaxsim.recipes.models.retriever import retriever_of
from pylate_fastmaxsim.recipes.robustness.task import Task
from pylate_fastmaxsim.tokens import TokenBatch

if TYPE_CHECKING:
    from pylate.models import ColBERT

Append = Literal["auto", "text", "tokens"]


@dataclass
class Lengthened:
    """Documents of each length, encoded when they are asked for, and how they were made.

    Parameters
    ----------
    append
        ``text``: other documents' words stand behind a document's own, and the model reads both. ``tokens``: their token
        embeddings stand behind those of the document, each as the model gives it by itself.
    limit
        The most tokens of a text that the model was given in place of its ``document_length``; None for ``tokens``.
    cut
        How many documents of each length were cut there, once they are encoded.
    """

    model: ColBERT
    task: Task
    documents: TokenBatch
    times: list[int]
    append: Append
    batch_size: int
    seed: int
    limit: int | None = None
    cut: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        limit, fast = positions(self.model[0].auto_model), self.model.tokenizer.is_fast
        longest = max(self.times) * self.model.document_length
        if self.append == "auto":
            self.append = "text" if fast and (limit is None or longest <= limit) else "tokens"
        if self.append == "text":
            if not fast:
                raise RecipeError(
                    "--append text needs a fast tokenizer, which says where the model cuts a text; use --append tokens."
                )
            self.limit = longest if limit is None else limit
        usable = sum(bool(text.split()) for text in self.task.fillers)
        # None may be the document itself.
        if max(self.times) > 1 and usable < 1 + any(own is not None for own in self.task.own):
            raise RecipeError(
                f"{self.task.name} has no other document that is relevant for no query, so there is no text to append; leave "
                "the lengths out with --times 1."
            )

    def __iter__(self) -> Iterator[tuple[int, TokenBatch]]:
        if max(self.times) == 1:
            yield 1, self.documents
        elif self.append == "text":
            yield from self._texts()
        else:
            fillers = retriever_of(self.model, finite=True).encode(
                self.task.fillers, self.batch_size, is_query=False, show_progress=True
            )
            fillers = fillers.with_values(fillers.values.float())
            yield from lengthened(self.documents, fillers, self.times, self.task.own, self.seed)

    def _texts(self) -> Iterator[tuple[int, TokenBatch]]:
        own = _read_by(self.model, self.task.documents)
        counts = [len(text.split()) for text in own]
        others = [text.split() for text in self.task.fillers]
        drawn = draw_fillers(counts, [*map(len, others)], max(self.times), self.task.own, self.seed)
        for times in self.times:
            if times == 1:
                yield 1, self.documents
                continue
            texts = []
            for text, count, some in zip(own, counts, drawn, strict=True):
                more = [word for filler in some for word in others[filler]]
                texts.append(" ".join([text, *more[: (times - 1) * count]]))
            before, self.model.document_length = self.model.document_length, self.limit
            try:
                whole = self.model.tokenizer(texts)["input_ids"]
                self.cut[times] = sum(len(ids) > _most_tokens(self.model) for ids in whole)
                batch = retriever_of(self.model, finite=True).encode(
                    texts, max(1, self.batch_size // times), is_query=False, show_progress=True
                )
            finally:
                self.model.document_length = before
            yield times, batch.with_values(batch.values.float())


def _read_by(model: ColBERT, texts: list[str]) -> list[str]:
    """The beginning of each text that the model reads, up to its ``document_length``."""
    stripped = [text.strip() for text in texts]  # as the model does
    most = _most_tokens(model)
    encoded = model.tokenizer(stripped, truncation=True, max_length=most, return_offsets_mapping=True)
    return [
        text if len(spans) < most else text[: max(end for _, end in spans)]
        for text, spans in zip(stripped, encoded["offset_mapping"], strict=True)
    ]


def _most_tokens(model: ColBERT) -> int:
    """How many tokens of the tokenizer fit beside PyLate's prefix."""
    return model.document_length - (model.document_prefix_id is not None)
