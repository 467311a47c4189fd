"""Search of the information retrieval evaluator of a MultiVectorEncoder."""

from __future__ import annotations

from functools import partial

import torch
from sentence_transformers.multi_vector_encoder.evaluation import MultiVectorInformationRetrievalEvaluator
from torch import Tensor

from pylate_fastmaxsim.integrations.options import Options
from pylate_fastmaxsim.integrations.patching import fallback
from pylate_fastmaxsim.integrations.patching.patches import Patch
from pylate_fastmaxsim.integrations.sentence_transformers.evaluation import Evaluator, Ranking, metrics_by, patches_of
from pylate_fastmaxsim.retrieval.search import SCORES_AT_ONCE
from pylate_fastmaxsim.retrieval.topk import largest


def patches() -> list[Patch]:
    """Replacements in Sentence Transformers."""
    return patches_of(MultiVectorInformationRetrievalEvaluator, all_metrics)


@partial(fallback.replaces, host="Sentence Transformers", pooled=False)(Evaluator.compute_metrices)
def all_metrics(_options: Options, evaluator, model, *args, **kwargs) -> dict[str, dict]:
    def find(name: str, queries: Tensor, documents: list[Tensor], order: Tensor, k: int) -> Ranking:
        scores = evaluator.score_functions[name](queries, documents).detach()
        scores = scores[:, order.to(scores.device)]
        rows = scores.split(max(1, SCORES_AT_ONCE // scores.shape[1]))
        places = torch.cat([largest(part, min(k, scores.shape[1])) for part in rows])
        return scores.gather(1, places), places

    return metrics_by(find, evaluator, model, *args, **kwargs)
