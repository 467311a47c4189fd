"""Scores of Sentence Transformers, XTR among them, without a similarity tensor: of its losses, evaluators and models."""

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from sentence_transformers.multi_vector_encoder.scoring import colbert as stock_scores
from sentence_transformers.multi_vector_encoder.scoring import xtr as stock_xtr
from sentence_transformers.util import similarity as stock_similarity
from sentence_transformers.util.similarity import _fill_empty_document_scores, _query_token_counts, _zero_row_mask
from sentence_transformers.util.tensor import _convert_to_tensor
from torch import Tensor

from pylate_fastmaxsim.integrations.log import log_once
from pylate_fastmaxsim.integrations.options import Options
from pylate_fastmaxsim.integrations.patching.fallback import FallbackToHost, Replacements, check, own_documents
from pylate_fastmaxsim.ops.pooled import pooled_scores
from pylate_fastmaxsim.ops.xtr import xtr_scores
from pylate_fastmaxsim.pooling import Max
from pylate_fastmaxsim.tokens import TokenBatch

# Other MaxSim and XTR scores of Sentence Transformers and those of its models go through these functions.
_replacements = Replacements("Sentence Transformers")
patches = _replacements.patches


@_replacements.of(stock_similarity, "maxsim")
def all_pairs(options: Options, a, b, *args, **kwargs) -> Tensor:
    if len(a) == 0 or len(b) == 0:
        return all_pairs.__wrapped__(a, b, *args, **kwargs)
    return _score_sides(options, False, a, b, *args, **kwargs)


@_replacements.of(stock_similarity, "maxsim_pairwise")
def pairs(options: Options, a, b, *args, **kwargs) -> Tensor:
    if len(a) == 0 or len(b) == 0:
        return pairs.__wrapped__(a, b, *args, **kwargs)
    return _score_sides(options, True, a, b, *args, **kwargs).squeeze(1)


def _score_sides(
    options: Options,
    pairwise: bool,
    a,
    b,
    a_mask=None,
    b_mask=None,
    chunk_elements=None,
    length_normalize=False,
    device=None,
) -> Tensor:
    queries, documents = _side(a, a_mask, of_queries=True), _side(b, b_mask)
    if device is not None and torch.device(device) != documents.device:
        raise FallbackToHost(f"the scores are to be computed on {device} and not where the documents are")
    own = torch.arange(len(documents), device=documents.device)[:, None] if pairwise else None
    counts = _counts(a, a_mask) if length_normalize else None
    return _score(options, queries, documents, own, counts)


def _score_groups(
    own: bool,
    options: Options,
    queries_embeddings,
    documents_embeddings,
    queries_mask=None,
    documents_mask=None,
    chunk_elements=None,
    length_normalize=False,
) -> Tensor:
    batches = _groups(queries_embeddings, documents_embeddings, queries_mask, documents_mask, own)
    return _score(options, *batches, _counts(queries_embeddings, queries_mask) if length_normalize else None)


_replacements.of(stock_scores, "colbert_scores")(partial(_score_groups, False))
_replacements.of(stock_scores, "colbert_kd_scores")(partial(_score_groups, True))


def _score_xtr(
    own: bool,
    options: Options,
    queries_embeddings,
    documents_embeddings,
    queries_mask=None,
    documents_mask=None,
    top_k=256,
    chunk_elements=None,
) -> Tensor:
    if not isinstance(options.pooling, Max):
        # No value in it: torch.compile traces this.
        log_once("The pooling of enable() has no effect with XTR scores: they choose tokens in a way of their own.")
    if type(top_k) is not int or top_k < 1:
        raise FallbackToHost(f"top_k is {top_k!r}")
    queries = _convert_to_tensor(queries_embeddings)
    if queries.dim() != 3:
        raise FallbackToHost(f"queries have the shape {tuple(queries.shape)}")
    queries, documents, candidates = _groups(queries, documents_embeddings, queries_mask, documents_mask, own)
    return _scored(queries, documents, candidates, partial(xtr_scores, k=top_k, normalizer="retrieved"))


_replacements.of(stock_xtr, "xtr_scores", pooled=False)(partial(_score_xtr, False))
_replacements.of(stock_xtr, "xtr_kd_scores", pooled=False)(partial(_score_xtr, True))


def _groups(
    queries, documents, queries_mask, documents_mask, own: bool
) -> tuple[TokenBatch, TokenBatch, Tensor | None]:
    """Queries ``[Nq, Lq, d]``, groups of documents ``[B, N, L, d]`` one behind the other, and the ``own`` of each query."""
    documents = _convert_to_tensor(documents)
    if documents.dim() != 4:
        raise FallbackToHost(f"documents have the shape {tuple(documents.shape)}")
    if documents_mask is not None:
        documents_mask = _convert_to_tensor(documents_mask)
        if documents_mask.shape != documents.shape[:-1]:
            raise FallbackToHost(f"a mask has the shape {tuple(documents_mask.shape)}")
        documents_mask = documents_mask.flatten(0, 1)
    queries = _side(_convert_to_tensor(queries), queries_mask, of_queries=True)
    candidates = own_documents(documents) if own else None
    return queries, _side(documents.flatten(0, 1), documents_mask), candidates


def _score(
    options: Options,
    queries: TokenBatch,
    documents: TokenBatch,
    candidates: Tensor | None,
    counts: Tensor | None,
) -> Tensor:
    """``counts``: the number of tokens of each query, for the mean over them."""
    scores = _scored(queries, documents, candidates, partial(pooled_scores, pooling=options.pooling))
    return scores if counts is None else scores / counts.to(scores)[:, None]


def _scored(
    queries: TokenBatch, documents: TokenBatch, candidates: Tensor | None, score: Callable[..., Tensor]
) -> Tensor:
    """Scores, of documents without a token stock's own. FallbackToHost where queries and documents do not fit together."""
    if candidates is not None and len(queries) != len(candidates):
        raise FallbackToHost("queries and documents differ in number")
    check(queries.values, documents.values, 2, 2)
    scores, empty = score(queries, documents, candidates=candidates).float(), documents.lengths == 0
    return _fill_empty_document_scores(scores, empty if candidates is None else empty[candidates])


def _side(embeddings, mask, of_queries: bool = False) -> TokenBatch:
    """Queries or documents as stock takes them: ``[N, L, d]``, one ``[L, d]``, or a list of these."""
    if isinstance(embeddings, list):
        if mask is not None:
            raise FallbackToHost("a list comes with a mask")
        sequences = [_convert_to_tensor(sequence) for sequence in embeddings]
        try:
            batch = TokenBatch.from_list(sequences)
        except ValueError:
            batch = None
        if batch is None or not batch.values.is_floating_point():
            raise FallbackToHost("embeddings in a list are not all floating point [L, d] of one d, dtype and device")
        return batch
    if not isinstance(embeddings, (Tensor, np.ndarray)):
        raise FallbackToHost(f"embeddings are of type {type(embeddings).__name__}")
    values = _convert_to_tensor(embeddings)
    if values.dim() == 2:
        values = values[None]
        mask = mask[None] if isinstance(mask, Tensor) and mask.dim() == 1 else mask
    if values.dim() != 3 or not values.is_floating_point():
        raise FallbackToHost(f"embeddings have the shape {tuple(values.shape)} and the dtype {values.dtype}")
    if mask is None:
        return TokenBatch.from_padded(values, _zero_row_mask(values).bool())
    if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.shape[1] != values.shape[1]:
        raise FallbackToHost("a mask is not [N, L] of the embeddings")
    if mask.device != values.device or mask.shape[0] not in (1, len(values)):
        raise FallbackToHost("a mask is not of the embeddings")
    if of_queries and mask.dtype != torch.bool:
        raise FallbackToHost("a mask of queries may weigh their tokens, because it is not bool")
    return TokenBatch.from_padded(values, mask.bool().expand(len(values), -1))


def _counts(queries, mask) -> Tensor:
    """Number of tokens of each query, by which stock divides for their mean, ``[Nq]``."""
    if isinstance(queries, (Tensor, np.ndarray)) and queries.ndim == 2:
        queries = queries[None]
        mask = mask[None] if mask is not None and mask.ndim == 1 else mask
    return _query_token_counts(queries, mask)
