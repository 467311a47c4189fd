"""XTR scores of Sentence Transformers without a similarity tensor."""

from __future__ import annotations

from sentence_transformers.multi_vector_encoder.scoring import xtr as stock_scores
from sentence_transformers.util.similarity import _fill_empty_document_scores
from sentence_transformers.util.tensor import _convert_to_tensor
from torch import Tensor

from pylate_fastmaxsim.integrations.log import log_once
from pylate_fastmaxsim.integrations.options import Options
from pylate_fastmaxsim.integrations.patching.fallback import FallbackToHost, check
from pylate_fastmaxsim.integrations.patching.patches import Patch
from pylate_fastmaxsim.integrations.sentence_transformers.scores import groups, replaces
from pylate_fastmaxsim.ops.xtr import xtr_scores
from pylate_fastmaxsim.pooling import Max


def patches() -> list[Patch]:
    """What to replace in Sentence Transformers. Its other XTR scores go through these."""
    return [Patch(stock_scores, "xtr_scores", batch_scores), Patch(stock_scores, "xtr_kd_scores", own_scores)]


@replaces(stock_scores.xtr_scores, pooled=False)
def batch_scores(
    options: Options,
    queries_embeddings,
    documents_embeddings,
    queries_mask=None,
    documents_mask=None,
    top_k=256,
    chunk_elements=None,
) -> Tensor:
    return _score(options, queries_embeddings, documents_embeddings, queries_mask, documents_mask, top_k, own=False)


@replaces(stock_scores.xtr_kd_scores, pooled=False)
def own_scores(
    options: Options,
    queries_embeddings,
    documents_embeddings,
    queries_mask=None,
    documents_mask=None,
    top_k=256,
    chunk_elements=None,
) -> Tensor:
    return _score(options, queries_embeddings, documents_embeddings, queries_mask, documents_mask, top_k, own=True)


def _score(options: Options, queries, documents, queries_mask, documents_mask, top_k, own: bool) -> Tensor:
    if not isinstance(options.pooling, Max):
        # No value in it: torch.compile traces this.
        log_once("The pooling of enable() has no effect with XTR scores: they choose tokens in a way of their own.")
    if type(top_k) is not int or top_k < 1:
        raise FallbackToHost(f"top_k is {top_k!r}")
    queries = _convert_to_tensor(queries)
    if queries.dim() != 3:
        raise FallbackToHost(f"queries have the shape {tuple(queries.shape)}")
    queries, documents, candidates = groups(queries, documents, queries_mask, documents_mask)
    if own and len(queries) != len(candidates):
        raise FallbackToHost("queries and documents differ in number")
    check(queries.values, documents.values, 2, 2)
    candidates = candidates if own else None
    scores = xtr_scores(queries, documents, top_k, candidates, normalizer="retrieved").float()
    empty = documents.lengths == 0
    return _fill_empty_document_scores(scores, empty if candidates is None else empty[candidates])
