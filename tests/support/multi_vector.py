"""Steps of the losses of a tiny MultiVectorEncoder."""

from functools import partial

import torch
from accelerate.utils import send_to_device
from sentence_transformers import MultiVectorEncoder, MultiVectorEncoderTrainer, MultiVectorEncoderTrainingArguments
from sentence_transformers.multi_vector_encoder import losses, scoring
from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask
from torch import nn

from pylate_fastmaxsim.integrations.sentence_transformers import scores
from tests.support import rank_steps
from tests.support.hosts import Host, Step, operators
from tests.support.models import sentences

COUNT = 8
TASKS = "query", "document", "document"
QUERIES, POSITIVES, NEGATIVES = (sentences(COUNT, longest, seed) for longest, seed in ((6, 1), (20, 2), (20, 3)))
TEACHER = torch.linspace(-1, 1, 2 * COUNT).view(COUNT, 2)
CONTRASTIVE = losses.MultiVectorMultipleNegativesRankingLoss
CACHED = losses.CachedMultiVectorMultipleNegativesRankingLoss
DISTILLATION = losses.MultiVectorDistillKLDivLoss
LOSSES = {
    "contrastive": (CONTRASTIVE, {}),
    "contrastive in mini-batches": (CONTRASTIVE, {"mini_batch_size": 5, "score_mini_batch_size": 3, "scale": 2.0}),
    "contrastive, mean": (CONTRASTIVE, {"similarity_fct": scoring.mean_colbert_scores, "scale": 8.0}),
    "contrastive by XTR": (CONTRASTIVE, {"similarity_fct": scoring.XTRScores(9)}),
    "cached": (CACHED, {"mini_batch_size": 3}),
    "cached by tokens": (CACHED, {"mini_batch_size": 8, "mini_batch_num_tokens": 60}),
    "distillation": (DISTILLATION, {"temperature": 0.5}),
    "margins": (losses.MultiVectorMarginMSELoss, {}),
    "cached by XTR": (CACHED, {"mini_batch_size": 3, "similarity_fct": scoring.XTRScores(9)}),
    "distillation by XTR": (DISTILLATION, {"similarity_fct": scoring.XTRKDScores(9)}),
    "margins by XTR": (losses.MultiVectorMarginMSELoss, {"similarity_fct": scoring.xtr_scores_pairwise}),
}
# Scores are float32 in a model in float64 too.
TOLERANCE = 3e-6


def load(path: str, **options: object) -> MultiVectorEncoder:
    torch.manual_seed(0)
    return MultiVectorEncoder(path, device="cpu", **options).double().train()


def batch_of(model: MultiVectorEncoder, texts: tuple = (QUERIES, POSITIVES, NEGATIVES)) -> list[dict]:
    columns = [{**model.preprocess(each, task=task), "task": task} for each, task in zip(texts, TASKS, strict=True)]
    return send_to_device(columns, model.device)


class OfOnesOwn(MultiVectorEncoder):
    def forward(self, input: dict, task: str | None = None) -> dict:
        for module in self:
            input = module(input, **({"task": task} if isinstance(module, MultiVectorMask) else {}))
        return input


def step_of(model: MultiVectorEncoder, loss_class: type[nn.Module] = CONTRASTIVE, **options: object) -> Step:
    return Step(loss_class(model, **options), batch_of(model), TEACHER, TOLERANCE)


def step_of_rank(model: MultiVectorEncoder, wrapped: nn.Module, name: str, rank: int, **options: object) -> Step:
    return Step(LOSSES[name][0](wrapped, **options), batch_of(model, rank_steps.texts_of(rank)), None, TOLERANCE)


HOST = Host(
    load=load,
    losses={name: partial(step_of, loss_class=loss_class, **options) for name, (loss_class, options) in LOSSES.items()},
    step_of_rank=step_of_rank,
    transformer=lambda model: model[0],
    decided_by=lambda model: model[0],
    # MPNet attends in code of its own; long texts change what this Llama makes of short ones.
    families={"modernbert": None, "mpnet": "grouped", "longrope": "padded"},
    watch=operators((scores, "pooled_scores"), (scores, "xtr_scores")),
    metric="similarity_fct",
    trainer=(MultiVectorEncoderTrainer, MultiVectorEncoderTrainingArguments),
)
modes = HOST.modes
