"""Retrievers: loaded models that encode texts or pages, rank documents exactly, and have a digest."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import isqrt
from typing import TYPE_CHECKING, Any

import sentence_transformers
import torch
from sentence_transformers import SentenceTransformer, SparseEncoder
from torch import Tensor, nn
from transformers import PreTrainedModel

from pylate_fastmaxsim.compressed import CompressedBatch
from pylate_fastmaxsim.integrations.sparse_encoder.names import Router
from pylate_fastmaxsim.ops.token_pooling import pool_tokens
from pylate_fastmaxsim.pooling import Max, Pooling
from pylate_fastmaxsim.recipes.errors import RecipeError, as_recipe_error
from pylate_fastmaxsim.retrieval.corpus import Corpus
from pylate_fastmaxsim.retrieval.search import search
from pylate_fastmaxsim.retrieval.sparse.index import SparseIndex
from pylate_fastmaxsim.retrieval.sparse.search import sparse_search
from pylate_fastmaxsim.retrieval.static.model import StaticLateInteraction
from pylate_fastmaxsim.retrieval.static.tokens import TokenIds
from pylate_fastmaxsim.sparse import SparseBatch
from pylate_fastmaxsim.tokens import TokenBatch

if TYPE_CHECKING:
    from colpali_engine.utils.processing_utils import BaseVisualRetrieverProcessor
    from peft import PeftModel
    from PIL.Image import Image

# Batches encoded in one call: the texts of a call are sorted by length, so more of them need less padding.
BATCHES_AT_ONCE = 64
# SpladePooling knows its size after the first text only.
FOUND_OUT = "word_embedding_dimension"


@dataclass
class PageModel:
    """A model of colpali-engine, with adapters or without, and the processor that makes its inputs."""

    model: PreTrainedModel | PeftModel
    processor: BaseVisualRetrieverProcessor

    @torch.no_grad()
    def encode(self, items: Sequence[str] | Sequence[Image], batch_size: int, is_query: bool) -> list[Tensor]:
        """The token vectors ``[L, d]`` of each query (a text) or page (an image), on the device of the model."""
        self.model.eval()
        process = self.processor.process_queries if is_query else self.processor.process_images
        found: list[Tensor] = []
        for begin in range(0, len(items), batch_size):
            batch = process(list(items[begin : begin + batch_size])).to(self.model.device)
            # Padding is rows of zeros.
            found += [row[row.any(dim=1)] for row in self.model(**batch)]
        return found

    def save_pretrained(self, directory: str) -> None:
        """Save both, so that ``from_pretrained`` of colpali-engine's classes loads them."""
        self.model.save_pretrained(directory)
        self.processor.save_pretrained(directory)


Encoded = TokenBatch | SparseBatch | TokenIds
# What is searched: a stream of batches, or an index.
Documents = Iterable[Encoded | CompressedBatch] | Corpus | SparseIndex
# Told how many documents have been scored since.
Progress = Callable[[int], object]


class NotFiniteError(Exception):
    """A model gave an embedding that is NaN or infinite."""


class Retriever:
    """A loaded model of late interaction, a ColBERT of PyLate by default.

    With ``finite`` it raises NotFiniteError for embeddings that are NaN or infinite, of which an order would look like any
    other. Without ``exact`` a static model ranks by upper bounds of MaxSim; every other is exact. Documents have one vector
    for ``pool_factor`` tokens.
    """

    kind = "late interaction"  # in reports
    has_token_embeddings = True  # whether documents are dense vectors, one for each token, and not sparse ones
    has_vectors = True  # whether documents are vectors, which an index keeps, and not token ids
    of_pages = False  # whether documents are images
    # Attributes of the host that change documents beside its modules.
    settings: tuple[str, ...] = ("document_length", "document_prefix", "skiplist_words")
    # How the host pools: PyLate leaves means as they are.
    pooling_options: dict[str, Any] = {"protected": 1}

    def __init__(self, model: Any, finite: bool = False, exact: bool = True, pool_factor: float = 1) -> None:
        self.model, self._finite, self.exact, self.pool_factor = model, finite, exact, pool_factor
        if pool_factor > 1 and self.kind != Retriever.kind:
            raise RecipeError(f"A pool factor is for models of token embeddings; this one is {self.kind}.")

    def encode(
        self, texts: Sequence[Any], batch_size: int, is_query: bool, show_progress: bool = False, **options: Any
    ) -> Encoded:
        """Texts as the model makes them: one vector for each token, without padding and skipped tokens, or a sparse one.

        Of a static model token ids, or sparse vectors; documents of a model of pages are images. ``options`` are more of
        those that ``encode`` of the host takes.
        """
        options |= {"batch_size": batch_size, "show_progress_bar": show_progress}
        batch = self._batch(self._host_output(texts, is_query, options))
        if is_query or self.pool_factor == 1:
            return batch
        return pool_tokens(batch, self.pool_factor, **self.pooling_options)

    def _host_output(self, texts: Sequence[Any], is_query: bool, options: dict[str, Any]) -> Any:
        """Embeddings of texts in the form of the host."""
        return self.model.encode(list(texts), is_query=is_query, convert_to_tensor=True, **options)

    def _batch(self, output: Any) -> Encoded:
        batch = TokenBatch.from_list(output)
        self._require_finite(batch.values)
        return batch

    def _require_finite(self, values: Tensor) -> None:
        if self._finite and not values.isfinite().all():
            raise NotFiniteError

    def search(
        self, queries: Encoded, documents: Documents, k: int, pooling: Pooling = Max(), progress: Progress | None = None
    ) -> tuple[Tensor, Tensor]:
        """Scores and positions ``[Nq, K]`` of the best documents of a stream of batches, or of an index.

        K is ``k``; with late interaction no more than there are documents. ``progress`` is told of documents, of sparse
        vectors of those of an index.
        """
        return search(queries, documents, k, pooling=pooling, progress=progress)

    @property
    def document_length(self) -> int | None:
        """The most tokens of a document that the model reads, those of the host included; None for no limit."""
        return getattr(*self._document_length_attribute())

    @contextmanager
    def reading_documents_to(self, length: int) -> Iterator[None]:
        """Context in which ``document_length`` is another."""
        before, attribute = self.document_length, self._document_length_attribute()
        setattr(*attribute, length)
        try:
            yield
        finally:
            setattr(*attribute, before)

    def _document_length_attribute(self) -> tuple[Any, str]:
        return self.model, "document_length"

    @property
    def document_transformer(self) -> nn.Module:
        """The host's module with the tokenizer and the encoder of documents."""
        first = self.model[0]
        return first.sub_modules["document"][0] if isinstance(first, Router) else first

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of documents."""
        return self.document_transformer.tokenizer

    def document_prompt_tokens(self) -> int:
        """Tokens that stand before the text of each document."""
        return int(self.model.document_prefix_id is not None)

    def query_token_ids(self, text: str) -> Tensor:
        """Ids of the tokens of a query of which ``encode`` makes embeddings."""
        tokenized = self.model.tokenize([text], is_query=True)
        ids, mask = tokenized["input_ids"][0], tokenized["attention_mask"][0]
        return ids if self.model.do_query_expansion else ids[mask.bool()]

    def digest(self) -> str:
        """A digest of the weights and settings by which documents are encoded."""
        names = (*self.settings, "prompts", "default_prompt_name", "max_seq_length")
        settings = {name: getattr(self.model, name) for name in names}
        modules = [(type(module).__name__, {**module.get_config_dict(), FOUND_OUT: None}) for module in self.model]
        tokenizers = [getattr(module, "tokenizer", None) for module in self.model]
        rules = [_rules(tokenizer) for tokenizer in tokenizers if tokenizer is not None]
        return self._digest([settings, modules, rules], self.model.state_dict())

    def _digest(self, settings: list, weights: dict[str, Tensor]) -> str:
        settings = [*settings, *([self.pool_factor] if self.pool_factor > 1 else [])]
        digest = hashlib.blake2b(json.dumps(settings, default=str).encode(), digest_size=16)
        for name, weight in weights.items():
            digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}".encode())
            digest.update(weight.cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        return digest.hexdigest()


class SentenceTransformersRetriever(Retriever):
    """A model that has methods for queries and for documents, which add its prompts and choose its route."""

    def _host_output(self, texts: Sequence[str], is_query: bool, options: dict[str, Any]) -> Tensor | list[Tensor]:
        return (self.model.encode_query if is_query else self.model.encode_document)(list(texts), **options)

    def document_prompt_tokens(self) -> int:
        names = ("document", "passage", "corpus", self.model.default_prompt_name)
        prompt = next((self.model.prompts[name] for name in names if self.model.prompts.get(name)), "")
        return len(self.document_transformer.tokenizer(prompt, add_special_tokens=False)["input_ids"])


class MultiVectorRetriever(SentenceTransformersRetriever):
    """A MultiVectorEncoder, whose modules hold all settings."""

    settings = ()
    pooling_options = {"protected": 1, "normalize": True}

    def _document_length_attribute(self) -> tuple[Any, str]:
        transformer = self.document_transformer
        has_own = getattr(transformer, "document_length", None) is not None
        return transformer, "document_length" if has_own else "max_seq_length"

    def query_token_ids(self, text: str) -> Tensor:
        encoded = self.model.encode_query(text, output_value=None)
        return encoded["input_ids"][encoded["attention_mask"].bool()]


class DenseRetriever(SentenceTransformersRetriever):
    """A SentenceTransformer: a text is one vector, as if it had one token."""

    kind = "dense"
    settings = ("similarity_fn_name",)

    def _batch(self, output: Tensor) -> TokenBatch:
        vectors = output.float()
        self._require_finite(vectors)
        if getattr(self.model, "similarity_fn_name", "cosine") == "cosine":
            vectors = torch.nn.functional.normalize(vectors, dim=1)
        return TokenBatch.from_packed(vectors, torch.arange(len(vectors) + 1, device=vectors.device))

    def _host_output(self, texts: Sequence[str], is_query: bool, options: dict[str, Any]) -> Tensor:
        return super()._host_output(texts, is_query, {**options, "convert_to_tensor": True})


class Model2VecRetriever(DenseRetriever):
    """A StaticModel of model2vec, which has cosines."""

    def _host_output(self, texts: Sequence[str], is_query: bool, options: dict[str, Any]) -> Tensor:
        return torch.from_numpy(self.model.encode(list(texts)))

    def digest(self) -> str:
        tables = {name: getattr(self.model, name) for name in ("embedding", "weights", "token_mapping")}
        tables = {name: torch.from_numpy(table) for name, table in tables.items() if table is not None}
        return self._digest([self.model.max_length, _rules(self.model.tokenizer)], tables)


class PagesRetriever(Retriever):
    """A model of pages."""

    of_pages = True
    document_length = None
    pooling_options = {"normalize": True}

    @property
    def tokenizer(self) -> Any:
        return self.model.processor.tokenizer

    def query_token_ids(self, text: str) -> Tensor:
        batch = self.model.processor.process_queries([text])
        return batch["input_ids"][0][batch["attention_mask"][0].bool()]

    def patches(self, page: Image) -> Tensor:
        """Where the token of each patch of a page is among those that ``encode`` makes of it, ``[rows, columns]``."""
        processor = self.model.processor
        batch = processor.process_images([page])
        places = processor.get_image_mask(batch)[0][batch["attention_mask"][0].bool()].nonzero().flatten()
        if "image_grid_thw" in batch:  # of a ColQwen2; those of a ColPali are a square
            return places.view(*(batch["image_grid_thw"][0, 1:] // processor.image_processor.merge_size).tolist())
        return places.view(isqrt(len(places)), -1)

    def _host_output(self, texts: Sequence[Any], is_query: bool, options: dict[str, Any]) -> list[Tensor]:
        return self.model.encode(texts, options["batch_size"], is_query)

    def digest(self) -> str:
        model, processor = self.model.model, self.model.processor
        settings = [type(model).__name__, processor.to_dict(), str(model.dtype)]
        return self._digest([*settings, _rules(getattr(processor, "tokenizer", None))], model.state_dict())


class SparseRetriever(SentenceTransformersRetriever):
    """A SparseEncoder."""

    kind = "sparse"
    has_token_embeddings = False
    settings = ("max_active_dims",)

    def _batch(self, output: Tensor) -> SparseBatch:
        self._require_finite(output.coalesce().values() if output.is_sparse else output)
        with as_recipe_error("The vectors of the sparse model cannot be searched"):
            return SparseBatch.from_torch(output)

    def _document_length_attribute(self) -> tuple[Any, str]:
        return self.document_transformer, "max_seq_length"

    def search(
        self, queries: Encoded, documents: Documents, k: int, pooling: Pooling = Max(), progress: Progress | None = None
    ) -> tuple[Tensor, Tensor]:
        if pooling != Max():
            raise RecipeError(
                "loss.pooling must be max for a sparse or static model, which has no similarities of tokens to pool."
            )
        found = self._search(queries, documents, k)
        if isinstance(documents, SparseIndex) and progress is not None:
            progress(len(documents))
        return found

    def _search(self, queries: SparseBatch, documents: Documents, k: int) -> tuple[Tensor, Tensor]:
        if isinstance(documents, SparseIndex):
            return documents.search(queries, k)
        return sparse_search(queries, documents, k)


class StaticRetriever(SparseRetriever):
    """A StaticLateInteraction, which ranks token ids by MaxSim, or without ``exact`` and with BM25 sparse vectors."""

    kind = "static late interaction"
    document_length = None

    @property
    def has_vectors(self) -> bool:
        return not self.exact or self.model.bm25_weights is not None

    def _host_output(self, texts: Sequence[str], is_query: bool, options: dict[str, Any]) -> SparseBatch | TokenIds:
        # It may lack counts of tokens, or its tokenizer give ids beyond its tables.
        with as_recipe_error("The static model cannot encode"):
            if not self.exact and self.model.threshold == -torch.inf:
                raise ValueError("--no-exact needs a threshold; save a StaticLateInteraction that has one.")
            tokens = self.model.token_ids(texts)
            if is_query or self.has_vectors:
                vectors = (self.model.queries if is_query else self.model.documents)(tokens)
            return vectors if self.has_vectors else tokens

    def _batch(self, output: SparseBatch | TokenIds) -> SparseBatch | TokenIds:
        return output  # whose vectors are finite

    def _search(self, queries: SparseBatch | TokenIds, documents: Documents, k: int) -> tuple[Tensor, Tensor]:
        if not self.has_vectors:
            documents = TokenIds.concatenate(list(documents))
        elif not isinstance(documents, SparseIndex):
            documents = SparseIndex.build(documents)
        return self.model.search(queries, documents, k)

    def digest(self) -> str:
        model = self.model
        tokenizer = getattr(model.tokenizer, "backend_tokenizer", model.tokenizer)
        mean_length = model.statistics.mean_length if model.bm25_weights and model.statistics else None
        settings = [model.threshold, model.keep, model.neighbours, model.skiplist, model.bm25_weights, mean_length]
        tables = {"queries": model.query_vectors, "documents": model.document_vectors}
        return self._digest([*settings, tokenizer.to_str()], tables)


def retriever_of(model: Any, finite: bool = False, exact: bool = True, pool_factor: float = 1) -> Retriever:
    """The :class:`Retriever` of a loaded model."""
    classes = {
        StaticLateInteraction: StaticRetriever,
        PageModel: PagesRetriever,
        SparseEncoder: SparseRetriever,
        # Which Sentence Transformers has from release 6 on.
        getattr(sentence_transformers, "MultiVectorEncoder", Retriever): MultiVectorRetriever,
    }
    # PyLate's ColBERT is a SentenceTransformer.
    kinds = {
        SentenceTransformer: DenseRetriever,
        getattr(sys.modules.get("model2vec"), "StaticModel", None): Model2VecRetriever,
    }
    kind = kinds.get(type(model)) or next(
        (kind for host, kind in classes.items() if isinstance(model, host)), Retriever
    )
    return kind(model, finite, exact, pool_factor)


def _rules(tokenizer: object) -> object:
    fast = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if hasattr(fast, "to_str"):
        rules = json.loads(fast.to_str())
        # Of the last call, and set anew by each.
        return {**rules, "truncation": None, "padding": None}
    return getattr(tokenizer, "get_vocab", dict)()
