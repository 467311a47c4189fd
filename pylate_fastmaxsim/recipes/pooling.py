"""The pooling of a recipe's scores: its value at each step, and scores with it in PyLate's losses."""

import math

import torch
from torch import Tensor
from transformers import TrainerCallback

from pylate_fastmaxsim.integrations.options import POOLINGS, current_options
from pylate_fastmaxsim.ops.score_metric import PooledScores
from pylate_fastmaxsim.pooling import Max, Pooling
from pylate_fastmaxsim.recipes.config.schema import PoolingSection


def pooling_at(section: PoolingSection | None, step: int, steps: int) -> Pooling:
    """The pooling after ``step`` of the ``steps`` of a training: at first ``start``, in the last step the value at the end."""
    if section is None:
        return Max()
    value = end = getattr(section, section.name)
    if section.schedule is not None:
        done = min(1.0, step / (steps - 1)) if steps > 1 else 1.0
        if section.schedule == "cosine":
            done = (1 - math.cos(math.pi * done)) / 2
        value = (1 - done) * section.start + done * end
    return POOLINGS[section.name](round(value) if section.name == "top_k" else value)


def final_pooling(section: PoolingSection | None) -> Pooling:
    """The pooling of a trained model: the value at the end of a schedule."""
    return pooling_at(section, 0, 1)


class PlainPooledScores:
    """PyLate's scores with another pooling than the maximum, as one would write them in PyTorch.

    Like ``pylate.scores.ColBERTScores`` and ``colbert_kd_scores``, in the dtype of ``einsum``, under autocast too. One
    group of documents at a time has its similarities in memory. Masked document tokens are left out, where PyLate
    multiplies their similarities by 0, and so are vectors of zeros. Every document needs a token that counts.
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
        products = "ash,ath->ast" if self.own_documents else "ash,bth->abst"
        counts = queries_mask if self.own_documents else queries_mask[:, None]
        groups = []
        for documents, live in zip(documents_embeddings.unbind(1), live_documents.unbind(1), strict=True):
            similarities = torch.einsum(products, queries_embeddings, documents)
            groups.append((self.pooling.of(similarities, live[:, None]) * counts).sum(dim=-1))
        scores = torch.stack(groups, dim=-1)
        return scores if self.own_documents else scores.flatten(1)


ScoreMetric = PooledScores | PlainPooledScores


def score_metric(section: PoolingSection, own_documents: bool) -> ScoreMetric:
    """The metric of the first step for the state that the plugin is in; its attribute ``pooling`` may be changed.

    With ``own_documents`` each query is scored against its own documents, as in distillation.
    """
    metric = PlainPooledScores if current_options() is None else PooledScores
    return metric(pooling_at(section, 0, 2), own_documents=own_documents)


class FollowSchedule(TrainerCallback):
    """Sets the pooling of a loss in each optimizer step, and logs k or the temperature beside the learning rate."""

    def __init__(self, section: PoolingSection, metric: ScoreMetric) -> None:
        self.section = section
        self.metric = metric

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        self.metric.pooling = pooling_at(self.section, state.global_step, state.max_steps)

    def on_log(self, args, state, control, logs, **kwargs) -> None:
        if "learning_rate" in logs:  # a step, not the summary at the end
            values = {f"pooling_{name}": value for name, value in vars(self.metric.pooling).items()}
            for entry in (logs, state.log_history[-1]):
                entry.update(values)
