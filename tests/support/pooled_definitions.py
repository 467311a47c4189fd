"""A score metric of a host in plain PyTorch, with any pooling."""

import torch
from torch import Tensor

from pylate_fastmaxsim import PooledScores, TokenBatch, reference


class PlainScores:
    """A ``score_metric`` of somebody's own, in plain PyTorch on padded embeddings, with the settings of a metric."""

    def __init__(self, metric: PooledScores) -> None:
        self.metric = metric

    def __call__(self, queries, documents, queries_mask=None, documents_mask=None) -> Tensor:
        pairs = documents.dim() == 3
        if pairs:
            documents, documents_mask = documents[:, None], documents_mask[:, None]
        # Rows of zeros do not count, masked or not.
        live = (queries != 0).any(dim=2) & (True if queries_mask is None else queries_mask.bool())
        candidates = None
        if self.metric.own_documents:
            candidates = torch.arange(documents.shape[:2].numel()).view(documents.shape[:2])
        documents = documents.flatten(0, 1)
        live_documents = (documents != 0).any(dim=2) & documents_mask.flatten(0, 1).bool()
        batches = TokenBatch.from_padded(queries, live), TokenBatch.from_padded(documents, live_documents)
        scores = reference.pooled_scores(*batches, candidates, pooling=self.metric.pooling)
        scores = scores / live.sum(1, keepdim=True).clamp(min=1) if self.metric.length_normalize else scores
        return scores.squeeze(1) if pairs else scores
