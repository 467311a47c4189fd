"""The float64 definition of each pooling, under the pooling's own name."""

from __future__ import annotations

from torch import Tensor

from pylate_fastmaxsim import LogSumExp, Max, Softmax, TokenBatch, TopK, reference
from pylate_fastmaxsim.ops.pooled import Pooling


def defined_scores(
    queries: TokenBatch, documents: TokenBatch, candidates: Tensor | None = None, *, pooling: Pooling
) -> Tensor:
    """Scores of :mod:`pylate_fastmaxsim.reference` with a pooling."""
    match pooling:
        case Max():
            return reference.maxsim(queries, documents, candidates)
        case TopK(k=k):
            return reference.top_k_scores(queries, documents, k, candidates)
        case Softmax(temperature=temperature):
            return reference.softmax_scores(queries, documents, temperature, candidates)
        case LogSumExp(temperature=temperature):
            return reference.log_sum_exp_scores(queries, documents, temperature, candidates)
