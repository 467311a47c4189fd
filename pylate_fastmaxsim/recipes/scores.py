"""Pooled scores as score metrics of PyLate's losses: in plain PyTorch where the plugin is off, fused where it is on."""

from __future__ import annotations

import torch
from torch import Tensor

from pylate_fastmaxsim.integrations.options import current_options
from pylate_fastmaxsim.ops.score_metric import PooledScores
from pylate_fastmaxsim.pooling import Pooling


class PlainPooledScores:
    """PyLate's scores with another pooling than the maximum, as one would write them in PyTorch.

    Like ``pylate.scores.ColBERTScores`` and ``colbert_kd_scores``, in the dtype of ``einsum``, under autocast too. One
    group of documents at a time has its similarities in memory. Masked document tokens are left out, where PyLate
    multiplies their similarities by 0, and so are vectors of zeros. Every document needs a token that counts.

    Examples
    --------
    >>> import torch
    >>> from pylate_fastmaxsim import Softmax
    >>> from pylate_fastmaxsim.recipes.scores import PlainPooledScores
    >>> scores = PlainPooledScores(Softmax(0.5))
    >>> scores(torch.ones(3, 4, 8), torch.ones(3, 2, 5, 8)).shape  # 3 queries, 2 documents for each
    torch.Size([3, 6])
    """

    def __init__(self, pooling: Pooling, own_documents: bool = False) -> None:
        self.pooling = pooling
        self.own_documents = own_documents

    def __call__(
        self,
        queries_embeddings: Tensor,
        documents_embeddings: Tensor,
        queries_mask: Tensor | None = None,
        documents_mask: Tensor | None = None,
    ) -> Tensor:
        """Scores ``[Nq, Nd * N]`` of queries ``[Nq, Lq, d]`` and documents ``[Nd, N, Ld, d]``, or ``[Nq, N]`` of own ones."""
        # As in PooledScores, a token whose vector is zero does not count.
        queries_mask = (queries_embeddings != 0).any(dim=-1) & (True if queries_mask is None else queries_mask.bool())
        live_documents = (documents_embeddings != 0).any(dim=-1)
        if documents_mask is not None:
            live_documents &= documents_mask.bool()
        groups = []
        for documents, live in zip(documents_embeddings.unbind(1), live_documents.unbind(1), strict=True):
            if self.own_documents:
                similarities, live = torch.einsum("ash,ath->ast", queries_embeddings, documents), live[:, None]
                counts = queries_mask
            else:
                similarities, live = torch.einsum("ash,bth->abst", queries_embeddings, documents), live[None, :, None]
                counts = queries_mask[:, None]
            groups.append((self.pooling.of(similarities, live) * counts).sum(dim=-1))
        scores = torch.stack(groups, dim=-1)
        return scores if self.own_documents else scores.flatten(1)


ScoreMetric = PooledScores | PlainPooledScores


def score_metric(pooling: Pooling, own_documents: bool) -> ScoreMetric:
    """The metric for the state that the plugin is in; its attribute ``pooling`` may be changed.

    With ``own_documents`` each query is scored against its own documents, as in distillation.
    """
    kind = PlainPooledScores if current_options() is None else PooledScores
    return kind(pooling, own_documents=own_documents)
