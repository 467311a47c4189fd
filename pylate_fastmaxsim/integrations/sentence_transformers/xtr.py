"""XTR scores of Sentence Transformers without a similarity tensor."""

from __future__ import annotations

from sentence_transformers.multi_vector_encoder.scoring import xtr as stock_scores
from sentence_transformers.util.tensor import _convert_to_tensor
from torch import Tensor

from pylate_fastmaxsim.integrations.log import log_once
from pylate_fastmaxsim.integrations.options import Options
from pylate_fastmaxsim.integrations.patching.fallback import FallbackToHost
from pylate_fastmaxsim.integrations.patching.patches import Patch
from pylate_fastmaxsim.integrations.sentence_transformers.scores import check_groups, groups, replaces, without_empty
from pylate_fastmaxsim.ops.xtr import xtr_scores
from pylate_fastmaxsim.pooling import Max


def patches() -> list[Patch]:
    """Replacements in Sentence Transformers. Its other XTR scores go through these."""
    return [Patch(stock_scores, "xtr_scores", batch_scores), Patch(stock_scores, "xtr_kd_scores", own_scores)]


@replaces(stock_scores.xtr_scores, pooled=False)
def batch_scores(options: Options, *args, **kwargs) -> Tensor:
    return _score(options, False, *args, **kwargs)


@replaces(stock_scores.xtr_kd_scores, pooled=False)
def own_scores(options: Options, *args, **kwargs) -> Tensor:
    return _score(options, True, *args, **kwargs)


def _score(
    options: Options,
    own: bool,
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
    queries, documents, candidates = groups(queries, documents_embeddings, queries_mask, documents_mask, own)
    check_groups(queries, documents, candidates)
    scores = xtr_scores(queries, documents, top_k, candidates, normalizer="retrieved").float()
    return without_empty(scores, documents, candidates)
