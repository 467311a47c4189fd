"""Texts as batches of what a model makes of them, token embeddings or sparse vectors, and exact search in those."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from sentence_transformers import SparseEncoder
from torch import Tensor

from pylate_fastmaxsim.compressed import CompressedBatch
from pylate_fastmaxsim.ops.pooled import Max, Pooling
from pylate_fastmaxsim.recipes.errors import RecipeError, first_line
from pylate_fastmaxsim.recipes.models.retriever import TextRetriever, VisualRetriever, is_multi_vector
from pylate_fastmaxsim.recipes.models.static import StaticDocuments, StaticQueries, encode_static, search_static
from pylate_fastmaxsim.retrieval.search import search
from pylate_fastmaxsim.retrieval.sparse_search import sparse_search
from pylate_fastmaxsim.retrieval.static.model import StaticLateInteraction
from pylate_fastmaxsim.sparse import SparseBatch
from pylate_fastmaxsim.tokens import TokenBatch

# Batches encoded in one call: the texts of a call are sorted by length, so more of them need less padding.
BATCHES_AT_ONCE = 64

Encoded = TokenBatch | SparseBatch | StaticQueries | StaticDocuments


def encode(
    model: TextRetriever, texts: Sequence[Any], batch_size: int, is_query: bool, show_progress: bool = False
) -> Encoded:
    """What ``model.encode`` makes of texts: one vector for each token, without padding and skipped tokens, or a sparse one.

    Of a static model token ids and sparse vectors; a visual one takes images in place of the texts of documents.
    """
    if isinstance(model, VisualRetriever):
        return TokenBatch.from_list(model.encode(texts, batch_size, is_query))
    if isinstance(model, StaticLateInteraction):
        return encode_static(model, texts, is_query)
    options = {"batch_size": batch_size, "show_progress_bar": show_progress}
    if not isinstance(model, SparseEncoder) and not is_multi_vector(model):
        return TokenBatch.from_list(model.encode(list(texts), is_query=is_query, convert_to_tensor=True, **options))
    # They add the prompts of the model and choose its route, where it has two.
    encode = model.encode_query if is_query else model.encode_document
    if is_multi_vector(model):
        return TokenBatch.from_list(encode(list(texts), **options))
    try:
        return SparseBatch.from_torch(encode(list(texts), convert_to_tensor=True, **options))
    except ValueError as error:
        raise RecipeError(f"The vectors of the sparse model cannot be searched: {first_line(error)}") from error


def exact_search(
    queries: Encoded, documents: Iterable[Encoded | CompressedBatch], k: int, pooling: Pooling = Max()
) -> tuple[Tensor, Tensor]:
    """Scores and positions ``[Nq, K]`` of the best documents of a stream of batches, both of one kind of model.

    K is ``k``; with late interaction no more than there are documents. Those of a static model are ranked by MaxSim, which
    is certified, or with BM25 weights by its sparse scores.

    Raises
    ------
    RecipeError
        ``pooling`` is another than the maximum, and the model is a sparse or a static one.
    """
    if isinstance(queries, (SparseBatch, StaticQueries)) and pooling != Max():
        raise RecipeError(
            "loss.pooling must be max for a sparse or static model, which has no similarities of tokens to pool."
        )
    if isinstance(queries, StaticQueries):
        return search_static(queries, documents, k)
    if isinstance(queries, SparseBatch):
        return sparse_search(queries, documents, k)
    return search(queries, documents, k, pooling=pooling)
