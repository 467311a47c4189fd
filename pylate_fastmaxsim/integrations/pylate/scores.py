"""PyLate's scoring functions, XTR among them, and reranking without a similarity tensor."""

import functools
from contextvars import ContextVar
from itertools import accumulate

import numpy as np
import torch
from pylate.rank import rank as stock_rank
from pylate.scores import XTRKDScores, XTRScores
from pylate.scores import colbert as stock_scores
from pylate.utils import convert_to_tensor
from torch import Tensor

from pylate_fastmaxsim.integrations.log import log_once
from pylate_fastmaxsim.integrations.options import Options
from pylate_fastmaxsim.integrations.patching.fallback import (
    FallbackToHost,
    Replacements,
    check,
    check_backend,
    own_documents,
    replaces,
)
from pylate_fastmaxsim.integrations.patching.known_sources import not_known, unknown_part
from pylate_fastmaxsim.ops.maxsim import maxsim
from pylate_fastmaxsim.ops.score_metric import PooledScores
from pylate_fastmaxsim.ops.xtr import xtr_scores
from pylate_fastmaxsim.pooling import Max
from pylate_fastmaxsim.tokens import TokenBatch

# Evaluators of PyLate score through these functions, and `retrieve.ColBERT` through `rerank`.
_replacements = Replacements("PyLate")
patches = _replacements.patches

# A loss of PyLate's runs as it came, which a line of log has said.
in_stock_loss = ContextVar("in_stock_loss", default=False)

_OWN_LOSS = (
    "A loss of your own calls the model, which encodes its documents with padding: call pylate_fastmaxsim.encode(model, "
    "features) in it instead, and pylate_fastmaxsim.maxsim on what it returns."
)


@_replacements.of(stock_scores.ColBERTScores, "__call__")
def score_groups(options: Options, _metric, *args, **kwargs):
    return _score(4, False, options, *args, **kwargs)


@_replacements.of(stock_scores, "colbert_scores_pairwise")
def colbert_scores_pairwise(options: Options, queries_embeddings, documents_embeddings, backend=None):
    _check_backend(backend)
    queries, documents = _sequences(queries_embeddings), _sequences(documents_embeddings)
    check(queries.values, documents.values, 2, 2)
    pairs = torch.arange(min(len(queries), len(documents)), device=queries.device)
    return _pooled(options, queries.select(pairs), documents, pairs[:, None]).squeeze(1)


@_replacements.of(stock_rank, "rerank")
def rerank(_options: Options, documents_ids, queries_embeddings, documents_embeddings, device=None):
    _check_backend(None)
    queries, documents = map(stock_rank.reshape_embeddings, (queries_embeddings, documents_embeddings))
    return [
        # Each left to stock by itself: what a generator has given is gone.
        _rerank_one([ids], [query], [list(own)], device)[0]
        for query, ids, own in zip(queries, documents_ids, documents, strict=False)
    ]


@replaces(stock_rank.rerank, "PyLate")
def _rerank_one(options: Options, documents_ids, queries, documents, device) -> list[list[stock_rank.RerankResult]]:
    (ids,), (query,), (documents,) = documents_ids, queries, documents
    query, documents = convert_to_tensor(query), list(map(convert_to_tensor, documents))
    if not documents:
        return [[]]
    query = query if device is None else query.to(device)
    documents = _pack(documents, query.device)
    check(query, documents.values, 2, 2)
    zero_floor = None
    if options.stock_masking:
        # Stock pads every document with zeros to the longest and lets those compete.
        zero_floor = documents.lengths < documents.max_length
    with torch.no_grad():
        scores = _pooled(options, TokenBatch.from_padded(query.unsqueeze(0)), documents, zero_floor=zero_floor)[0]
    scores, order = scores.sort(descending=True)
    pairs = zip(order.tolist(), scores.tolist(), strict=True)
    return [[stock_rank.RerankResult(id=ids[index], score=score) for index, score in pairs]]


def _check_backend(backend: str | None) -> None:
    if backend is None:
        check_backend("PYLATE_SCORES_BACKEND")
    elif backend.lower() != "auto":
        raise FallbackToHost(f"the call asks for backend={backend!r}")


def _score(
    documents_dim: int,
    own: bool,
    options: Options,
    queries,
    documents,
    queries_mask=None,
    documents_mask=None,
    backend=None,
) -> Tensor:
    _check_backend(backend)
    given = queries, documents, queries_mask, documents_mask
    return _pooled(options, *_batches(documents_dim, own, *given, has_floor=options.stock_masking))


_replacements.of(stock_scores, "colbert_scores")(functools.partial(_score, 3, False))
_replacements.of(stock_scores, "colbert_kd_scores")(functools.partial(_score, 4, True))


def _score_xtr(
    own: bool,
    options: Options,
    metric,
    queries_embeddings,
    documents_embeddings,
    queries_mask=None,
    documents_mask=None,
) -> Tensor:
    # Asked only where the answer may be no: torch.compile cannot trace the question.
    is_plain = "_score" not in vars(metric) and type(metric)._score is XTRScores._score
    if not is_plain and (part := unknown_part(XTRScores.__call__, metric)) is not None:
        raise FallbackToHost(not_known(part))
    if getattr(queries_mask, "requires_grad", False):
        # Which tokens pass does not depend on it in stock, where it comes after their choice.
        raise FallbackToHost("queries_mask requires a gradient")
    documents_mask = None if documents_mask is None else documents_mask.bool()
    # A masked token never passes, and a token that does not pass counts as 0.
    queries, documents, candidates, zero_floor = _batches(
        4, own, queries_embeddings, documents_embeddings, queries_mask, documents_mask, has_floor=True
    )
    _say_if_of_own_loss(options, queries)
    return xtr_scores(queries, documents, metric.k, candidates, zero_floor=zero_floor).float()


_replacements.of(XTRScores, "__call__", pooled=False)(functools.partial(_score_xtr, False))
_replacements.of(XTRKDScores, "__call__", pooled=False)(functools.partial(_score_xtr, True))


def _batches(
    documents_dim: int, own: bool, queries, documents, queries_mask, documents_mask, has_floor: bool
) -> tuple[TokenBatch, TokenBatch, Tensor | None, Tensor | None]:
    """Queries, documents, the ``own`` of each query, and which documents have a masked token, for a floor of 0.

    Documents come as ``[N, L, d]`` or in groups ``[B, N, L, d]``.
    """
    queries, documents = convert_to_tensor(queries), convert_to_tensor(documents)
    check(queries, documents, 3, documents_dim)
    if own and len(queries) != len(documents):
        raise FallbackToHost("queries and documents differ in number")
    candidates = own_documents(documents) if own else None
    zero_floor = None
    if documents_mask is not None:
        documents_mask = _broadcast(documents_mask, documents).flatten(0, -2)
        zero_floor = (documents_mask == 0).any(dim=1) if has_floor else None
    if queries_mask is not None:
        queries_mask = _broadcast(queries_mask, queries)
    queries, documents = _masked_batch(queries, queries_mask), _masked_batch(documents.flatten(0, -3), documents_mask)
    return queries, documents, candidates, zero_floor


def _pooled(
    options: Options,
    queries: TokenBatch,
    documents: TokenBatch,
    candidates: Tensor | None = None,
    zero_floor: Tensor | None = None,
) -> Tensor:
    """Scores as ``enable(pooling=...)`` says; a ``zero_floor`` goes with the maximum only."""
    _say_if_of_own_loss(options, queries)
    if isinstance(options.pooling, Max):
        return maxsim(queries, documents, candidates, zero_floor=zero_floor)
    return PooledScores(options.pooling).of_batches(queries, documents, candidates)


def _say_if_of_own_loss(options: Options, queries: TokenBatch) -> None:
    """Losses of PyLate do not come here, but for those that run as they came; nor do evaluators ask for gradients."""
    trains = options.padding_free and queries.values.requires_grad and torch.is_grad_enabled()
    # A compiled loss cannot ask where it is called from.
    if trains and not torch.compiler.is_compiling() and not in_stock_loss.get():
        log_once(_OWN_LOSS)


def _broadcast(mask, embeddings: Tensor) -> Tensor:
    """The mask in the shape of the tokens. Stock also takes several masks of one sequence, for scores of each."""
    mask, shape = convert_to_tensor(mask), embeddings.shape[:-1]
    if mask is None:
        raise FallbackToHost("a mask is neither a tensor nor an array nor a list of them")
    if mask.dim() != len(shape) or any(size not in (1, whole) for size, whole in zip(mask.shape, shape, strict=True)):
        raise FallbackToHost(f"a mask has the shape {tuple(mask.shape)} for embeddings of {tuple(embeddings.shape)}")
    return mask.broadcast_to(shape)


def _masked_batch(values: Tensor, mask: Tensor | None) -> TokenBatch:
    """Padded token vectors ``[N, L, d]`` as a ragged batch of those that a mask ``[N, L]`` keeps, weighed by it."""
    if mask is not None and mask.dtype != torch.bool:
        if torch.promote_types(values.dtype, mask.dtype) == torch.float64 != values.dtype:
            raise FallbackToHost(f"a mask is float64 and the embeddings are {values.dtype}, so that scores are float64")
        # Stock multiplies similarities by the mask, so any number is allowed: it weighs a token.
        values = values * mask.unsqueeze(-1).to(values.dtype)
        # With a gradient weights and no mask: one of 0 has a gradient too, and its token counts with a similarity of 0.
        mask = None if mask.requires_grad else mask != 0
    return TokenBatch.from_padded(values, mask)


def _sequences(embeddings: Tensor | np.ndarray | list) -> TokenBatch:
    """Matrices of token vectors in any form that pairwise scoring takes."""
    if isinstance(embeddings, np.ndarray) and embeddings.dtype != object:
        embeddings = torch.from_numpy(embeddings)
    if isinstance(embeddings, Tensor):
        if embeddings.dim() != 3 or not embeddings.is_floating_point():
            raise FallbackToHost(
                f"embeddings have the shape {tuple(embeddings.shape)} and the dtype {embeddings.dtype}"
            )
        return TokenBatch.from_padded(embeddings)
    if not isinstance(embeddings, (list, tuple, np.ndarray)) or len(embeddings) == 0:
        raise FallbackToHost(f"embeddings are an empty or unknown sequence of type {type(embeddings).__name__}")
    sequences = [convert_to_tensor(sequence) for sequence in embeddings]
    if len({sequence.dtype for sequence in sequences}) > 1:
        raise FallbackToHost("embeddings in a list differ in dtype")
    return _pack(sequences, sequences[0].device)


def _pack(sequences: list[Tensor], device: torch.device) -> TokenBatch:
    """Token matrices back to back in the dtype of the first, moved to ``device`` at once."""
    first = sequences[0]
    if any(sequence.dim() != 2 or sequence.shape[1] != first.shape[1] for sequence in sequences):
        raise FallbackToHost("embeddings in a list are not all [tokens, d] of one d")
    if not first.is_floating_point():
        raise FallbackToHost(f"embeddings have the dtype {first.dtype}")
    lengths = [len(sequence) for sequence in sequences]
    # Autocast would widen what is put together, and refuses some dtypes.
    with torch.autocast(first.device.type, enabled=False):
        values = torch.cat([sequence.to(first) for sequence in sequences]).to(device)
    return TokenBatch.from_packed(values, torch.tensor([0, *accumulate(lengths)]), max_length=max(lengths))
