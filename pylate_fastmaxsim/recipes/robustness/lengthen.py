"""Documents of several lengths: text appended and encoded again, or embeddings of the tokens of other documents."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from pylate_fastmaxsim.diagnostics.robustness import draw_fillers, lengthened
from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.models.load import encoder_of, positions
from pylate_fastmaxsim.recipes.models.retriever import Encoded, Retriever
from pylate_fastmaxsim.recipes.robustness.task import Append, Task
from pylate_fastmaxsim.tokens import TokenBatch


def encode(retriever: Retriever, texts: Sequence[Any], batch_size: int, is_query: bool) -> Encoded:
    """Encode texts or pages, token embeddings in float32."""
    batch = retriever.encode(texts, batch_size, is_query=is_query, show_progress=True)
    return batch.with_values(batch.values.float()) if isinstance(batch, TokenBatch) else batch


@dataclass
class Lengthened:
    """Documents of each length, encoded when they are asked for.

    With ``append`` of ``text`` other documents' words stand behind a document's own, and the model reads both. With
    ``tokens`` their token embeddings stand behind those of the document, each as the model gives it by itself.
    """

    retriever: Retriever
    task: Task
    documents: Encoded
    times: list[int]
    append: Append
    batch_size: int
    seed: int
    limit: int | None = None  # of the tokens of a text that the model reads, in place of its document_length
    cut: dict[int, int] = field(default_factory=dict)  # how many documents of each length exceed it, once encoded

    def __post_init__(self) -> None:
        has_tokens = self.retriever.has_token_embeddings
        if self.append == "tokens" and not has_tokens:
            raise RecipeError(
                f"--append tokens needs a model of token embeddings, and this one is {self.retriever.kind}; use --append text."
            )
        length, of_pages = self.retriever.document_length, self.retriever.of_pages
        if of_pages and self.append == "text":
            raise RecipeError("--append text needs a model of texts, and this one is of pages; use --append tokens.")
        if of_pages:
            self.append = "tokens"
        elif length is None:
            self.append = "text"
        else:
            self._choose_append(max(self.times) * length, has_tokens)
        fillers = self.task.fillers
        usable = len(fillers) if of_pages else sum(bool(text.split()) for text in fillers)
        # None may be the document itself.
        if max(self.times) > 1 and usable < 1 + any(own is not None for own in self.task.own):
            raise RecipeError(
                f"{self.task.name} has no other document that is relevant for no query, so there is nothing to append; leave "
                "the lengths out with --times 1."
            )

    def _choose_append(self, longest: int, has_tokens: bool) -> None:
        """Set ``append`` and ``limit`` for documents of up to ``longest`` tokens."""
        transformer = self.retriever.document_transformer
        limit, fast = positions(encoder_of(transformer)), transformer.tokenizer.is_fast
        if self.append == "auto":
            fits = fast and (limit is None or longest <= limit)
            self.append = "text" if fits or not has_tokens else "tokens"
        if self.append == "text":
            if not fast and max(self.times) > 1:
                other = "--append tokens" if has_tokens else "--times 1"
                raise RecipeError(
                    f"--append text needs a fast tokenizer, which says where the model cuts a text; use {other}."
                )
            self.limit = longest if limit is None else limit

    def __iter__(self) -> Iterator[tuple[int, Encoded]]:
        if max(self.times) == 1:
            yield 1, self.documents
        elif self.append == "text":
            yield from self._texts()
        else:
            fillers = encode(self.retriever, self.task.fillers, self.batch_size, is_query=False)
            yield from lengthened(self.documents, fillers, self.times, self.task.own, self.seed)

    def _texts(self) -> Iterator[tuple[int, Encoded]]:
        own = self._read_texts()
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
            yield times, self._encode_longer(texts, times)

    def _encode_longer(self, texts: list[str], times: int) -> Encoded:
        batch_size = max(1, self.batch_size // times)
        if self.limit is None:
            return encode(self.retriever, texts, batch_size, is_query=False)
        whole = self.retriever.document_transformer.tokenizer(texts)["input_ids"]
        self.cut[times] = sum(len(ids) > self.limit - self.retriever.document_prompt_tokens() for ids in whole)
        with self.retriever.reading_documents_to(self.limit):
            return encode(self.retriever, texts, batch_size, is_query=False)

    def _read_texts(self) -> list[str]:
        """The beginning of each document that the model reads, up to its ``document_length``."""
        stripped = [text.strip() for text in self.task.documents]  # as the model does
        if self.limit is None:
            return stripped
        most = self.retriever.document_length - self.retriever.document_prompt_tokens()
        tokenizer = self.retriever.document_transformer.tokenizer
        encoded = tokenizer(stripped, truncation=True, max_length=most, return_offsets_mapping=True)
        return [
            text if len(spans) < most else text[: max(end for _, end in spans)]
            for text, spans in zip(stripped, encoded["offset_mapping"], strict=True)
        ]
