"""Exact search of sparse embeddings in the place of scores for every document.

These are held by ``semantic_search`` and by ``SparseInformationRetrievalEvaluator``.
"""

import functools
import sys
from collections.abc import Callable

import torch
from sentence_transformers import SimilarityFunction, SparseEncoder
from sentence_transformers.sparse_encoder.evaluation import SparseInformationRetrievalEvaluator
from sentence_transformers.util import cos_sim, dot_score
from sentence_transformers.util import semantic_search as stock_search
from torch import Tensor

from pylate_fastmaxsim.integrations.log import log_once
from pylate_fastmaxsim.integrations.options import Options
from pylate_fastmaxsim.integrations.patching import fallback
from pylate_fastmaxsim.integrations.patching.fallback import FallbackToHost
from pylate_fastmaxsim.integrations.patching.known_sources import not_known, unknown_part
from pylate_fastmaxsim.integrations.patching.patches import Patch
from pylate_fastmaxsim.integrations.sentence_transformers.evaluation import Evaluator, Ranking, metrics_by, patches_of
from pylate_fastmaxsim.retrieval.sparse.search import sparse_search
from pylate_fastmaxsim.sparse import SparseBatch

_replaces = functools.partial(fallback.replaces, host="Sentence Transformers", pooled=False)

_LAYOUTS = {torch.sparse_coo, torch.sparse_csr, torch.sparse_csc}


def patches() -> list[Patch]:
    """Replacements in Sentence Transformers."""
    of_evaluator = patches_of(Evaluator, all_metrics)
    return [Patch(sys.modules[stock_search.__module__], "semantic_search", semantic_search), *of_evaluator]


@_replaces(stock_search)
def _exact_search(
    options: Options,
    query_embeddings,
    corpus_embeddings,
    query_chunk_size=100,
    corpus_chunk_size=500000,
    top_k=10,
    score_function=cos_sim,
) -> list[list[dict[str, int | float]]]:
    if not len(query_embeddings) or not len(corpus_embeddings):
        return _exact_search.__wrapped__(query_embeddings, corpus_embeddings)
    read = _reader_for(score_function)
    if type(top_k) is not int or top_k < 1:
        raise FallbackToHost(f"top_k is {top_k!r}")
    documents = read(corpus_embeddings)
    queries = read(query_embeddings).to(documents.device)
    scores, positions = _top(queries, documents, top_k)
    return [
        [{"corpus_id": position, "score": score} for position, score in zip(*row, strict=True)]
        for row in zip(positions.tolist(), scores.tolist(), strict=True)
    ]


@functools.wraps(_exact_search)
def semantic_search(query_embeddings, corpus_embeddings, *options) -> list[list[dict[str, int | float]]]:
    # Dense embeddings do not even pay for the look at stock's source.
    is_sparse = _is_sparse(query_embeddings) or _is_sparse(corpus_embeddings)
    search = _exact_search if is_sparse else _exact_search.__wrapped__
    return search(query_embeddings, corpus_embeddings, *options)


def _reader_for(score_function: Callable) -> Callable[[Tensor | list[Tensor]], SparseBatch]:
    """A reader of vectors whose inner products are the scores of a function of Sentence Transformers.

    It takes sparse embeddings ``[N, vocabulary]``, one ``[vocabulary]``, or a list of these, with weights from 0.
    """
    if getattr(score_function, "__func__", None) is SparseEncoder.similarity:
        # Before release 6 a property that returns the function.
        _refuse_unknown(score_function)
        score_function = SimilarityFunction.to_similarity_fn(score_function.__self__.similarity_fn_name)
    if score_function is not dot_score and score_function is not cos_sim:
        name = getattr(score_function, "__name__", type(score_function).__name__)
        raise FallbackToHost(f"the score function {name} is neither dot_score nor cos_sim")
    _refuse_unknown(score_function)
    return _read if score_function is dot_score else _read_normalized


def _read(embeddings: Tensor | list[Tensor]) -> SparseBatch:
    if not _is_sparse(embeddings):
        raise FallbackToHost("some embeddings are dense")
    if isinstance(embeddings, list):
        embeddings = torch.stack(embeddings)
    if embeddings.dim() > 2 or embeddings.dense_dim():
        raise FallbackToHost("embeddings are not [N, vocabulary]")
    try:
        return SparseBatch.from_torch(embeddings)
    except ValueError:
        raise FallbackToHost("embeddings have weights that are negative, not finite or no real numbers") from None


def _read_normalized(embeddings: Tensor | list[Tensor]) -> SparseBatch:
    """Each vector divided by its L2 norm, computed in float64 and rounded once."""
    batch = _read(embeddings)
    weights = batch.weights.double()
    norms = torch.segment_reduce(weights.square(), "sum", offsets=batch.offsets).sqrt()
    weights = (weights / norms.repeat_interleave(batch.offsets.diff())).float()
    return SparseBatch._trusted(batch.offsets, batch.terms, weights, batch.vocabulary)


def _top(queries: SparseBatch, documents: SparseBatch, k: int) -> tuple[Tensor, Tensor]:
    """Scores and positions ``[Nq, min(k, Nd)]`` of the documents with the largest inner products, found where queries are.

    A document that shares no term scores 0, as in Sentence Transformers. Equal scores: lower positions first.

    Examples
    --------
    >>> queries = SparseBatch.from_lists([[(0, 1.0)], []], vocabulary=2)
    >>> documents = SparseBatch.from_lists([[(1, 1.0)], [(1, 2.0)], [(0, 3.0)]], vocabulary=2)
    >>> _top(queries, documents, k=2)
    (tensor([[3., 0.],
            [0., 0.]]), tensor([[2, 0],
            [0, 1]]))
    """
    if queries.vocabulary != documents.vocabulary:
        raise FallbackToHost(f"embeddings have {queries.vocabulary} and {documents.vocabulary} dimensions")
    if queries.device.type not in ("cpu", "cuda"):
        raise FallbackToHost(f"embeddings are on {queries.device}")
    k = min(k, len(documents))
    try:
        scores, positions = sparse_search(queries, [documents], k)
    except ImportError as error:
        raise FallbackToHost(str(error).rstrip(".")) from None
    # A product of tiny weights may round to 0. It then ranks by its position among those without a common term.
    found = scores > 0
    columns = torch.arange(k, device=scores.device)
    taken = torch.zeros(len(scores), k + 1, dtype=torch.uint8, device=scores.device)
    taken.scatter_(1, torch.where(found, positions, k).clamp(max=k), 1)
    # Of the first k documents as many are free as there are places left, or more.
    free = taken[:, :k].sort(dim=1, stable=True).indices
    rest = free.gather(1, (columns - found.sum(dim=1, keepdim=True)).clamp(min=0))
    return torch.where(found, scores, 0), torch.where(found, positions, rest)


def _refuse_unknown(function: Callable) -> None:
    if (part := unknown_part(function)) is not None:
        raise FallbackToHost(not_known(part))


def _is_sparse(embeddings: object) -> bool:
    first = embeddings[0] if isinstance(embeddings, list) and embeddings else embeddings
    return isinstance(first, Tensor) and first.layout in _LAYOUTS


@_replaces(Evaluator.compute_metrices)
def all_metrics(options: Options, evaluator, model, *args, **kwargs) -> dict[str, dict]:
    if not isinstance(evaluator, SparseInformationRetrievalEvaluator):
        return all_metrics.__wrapped__(evaluator, model, *args, **kwargs)
    functions = evaluator.score_functions
    readers = {name: _reader_for(function) for name, function in functions.items()}

    def find(name: str, queries: Tensor, documents: Tensor, order: Tensor, k: int) -> Ranking:
        """Results are on the CPU."""
        try:
            of_queries, of_documents = readers[name](queries), readers[name](documents)
            of_queries = of_queries.to(model.device) if model.device.type == "cuda" else of_queries
            found = _top(of_queries, of_documents.select(order), k)
        except FallbackToHost as reason:
            # Not the whole function of the host, which would encode again.
            host = "Sentence Transformers"
            log_once("%s is not accelerated (running %s's own): %s.", Evaluator.__name__, host, reason)
            scores = functions[name](queries, documents)
            found = scores[:, order.to(scores.device)].sort(dim=1, descending=True, stable=True)
        return tuple(each[:, :k].cpu() for each in found)

    return metrics_by(find, evaluator, model, *args, **kwargs)
