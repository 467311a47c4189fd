"""Steps of the losses of a tiny SPLADE model: every loss that trains one."""

from collections.abc import Sequence
from functools import partial

import pytest
import torch
from sentence_transformers import SparseEncoder, SparseEncoderTrainer, SparseEncoderTrainingArguments
from sentence_transformers.sparse_encoder import losses
from torch import Tensor, nn
from torch.nn import functional as F

from pylate_fastmaxsim.integrations.models.encoders import hidden_states_of
from tests.support import rank_steps
from tests.support.hosts import Host, Step
from tests.support.models import sentences
from tests.support.sparse_encoders import FAMILIES, splade, transformer_of

pytest.importorskip("sentence_transformers", minversion="5.1", reason="no SPLADE by the flag before it")

COUNT = 6
TASKS = ("query", "document", "document", "document")
TEXTS = [sentences(COUNT, longest, seed) for longest, seed in ((6, 1), (20, 2), (20, 3), (30, 4))]
# Labels of pairs, of triplets and of several negatives.
SCORES = torch.linspace(1, 0, COUNT, dtype=torch.float64)
MARGINS = torch.linspace(-1, 1, COUNT, dtype=torch.float64)
TEACHER = torch.linspace(-1, 1, 3 * COUNT, dtype=torch.float64).view(COUNT, 3)
TOLERANCE = 1e-9

CONTRASTIVE = losses.SparseMultipleNegativesRankingLoss
# Options of splade_loss() for GradCache; before release 5.3, which has none, those for a loss without it.
CACHED = {"kind": losses.CachedSpladeLoss, "mini_batch_size": 4} if hasattr(losses, "CachedSpladeLoss") else {}


def batch_of(model: SparseEncoder, columns: int = 3, texts: Sequence[list[str]] = TEXTS) -> list[dict]:
    tokenize = model.preprocess if hasattr(model, "preprocess") else model.tokenize
    columns = [tokenize(each, task=task) for each, task in zip(texts[:columns], TASKS, strict=False)]
    return [{key: value for key, value in column.items() if value is not None} for column in columns]


def splade_loss(
    model: SparseEncoder, base: type[nn.Module] = CONTRASTIVE, kind: type[nn.Module] = losses.SpladeLoss, **options
):
    """A loss with regularisers. Those of the base loss are in ``base``, a class or a partial of one."""
    weights = {"document_regularizer_weight": 3e-2}
    if not options.get("use_document_regularizer_only"):
        weights["query_regularizer_weight"] = 5e-2
    return kind(model, base(model), **{**weights, **options})


def step_of(
    model: SparseEncoder, base: type[nn.Module] = CONTRASTIVE, columns: int = 3, labels: Tensor | None = None, **options
) -> Step:
    return Step(splade_loss(model, base, **options), batch_of(model, columns), labels, TOLERANCE)


class L1(nn.Module):
    def compute_loss_from_embeddings(self, embeddings: Tensor) -> Tensor:
        return embeddings.abs().sum(dim=1).mean()


def squared_error(similarities: Tensor, labels: Tensor) -> Tensor:
    """The default but for labels, which stock casts to float32, and similarities here are float64."""
    return F.mse_loss(similarities, labels.to(similarities))


def of_embeddings(model: SparseEncoder) -> Step:
    queries, documents = batch_of(model, 2)
    with torch.no_grad():
        teacher = model(dict(queries))["sentence_embedding"].roll(1, dims=0)
    return Step(losses.SparseMSELoss(model), [queries, documents], teacher, TOLERANCE)


SEVERAL = partial(CONTRASTIVE, gather_across_devices=True)
DISTILLATION = partial(losses.SparseDistillKLDivLoss, temperature=0.5)
COSINE = partial(losses.SparseCosineSimilarityLoss, loss_fct=squared_error)
LOSSES = {
    "contrastive": step_of,
    "cached": partial(step_of, **CACHED),
    "distillation": partial(step_of, base=DISTILLATION, columns=4, labels=TEACHER),
    "pairs": partial(step_of, columns=2),
    "several negatives": partial(step_of, base=SEVERAL, columns=4),
    "thresholds": partial(step_of, document_regularizer_threshold=150, query_regularizer_threshold=80),
    "all are documents": partial(step_of, use_document_regularizer_only=True),
    "L1": partial(step_of, document_regularizer=L1(), query_regularizer=L1()),
    "margins": partial(step_of, base=losses.SparseMarginMSELoss, labels=MARGINS),
    "margins of several": partial(step_of, base=losses.SparseMarginMSELoss, columns=4, labels=TEACHER),
    "triplets": partial(step_of, base=losses.SparseTripletLoss),
    "cosine": partial(step_of, base=COSINE, columns=2, labels=SCORES),
    "CoSENT": partial(step_of, base=losses.SparseCoSENTLoss, columns=2, labels=SCORES),
    "AnglE": partial(step_of, base=losses.SparseAnglELoss, columns=2, labels=SCORES),
    "cached distillation": partial(step_of, base=losses.SparseDistillKLDivLoss, columns=4, labels=TEACHER, **CACHED),
    "embeddings": of_embeddings,
}


def watch_decoder(model: SparseEncoder, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens the decoder of the masked language model is called with, call by call."""
    decoder, seen, stock = transformer_of(model).auto_model.get_output_embeddings(), [], F.linear

    # Not its forward, nor that of Linear: a model with code of the user's own is encoded with padding.
    def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if weight is decoder.weight:
            seen.append(input.shape[:-1].numel())
        return stock(input, weight, bias)

    monkeypatch.setattr(F, "linear", linear)
    return seen


def step_of_rank(model: SparseEncoder, wrapped: nn.Module, name: str, rank: int, **options) -> Step:
    loss = splade_loss(model, SEVERAL, **(CACHED if name == "cached" else {}), **options)
    loss.model = wrapped
    return Step(loss, batch_of(model, 3, rank_steps.texts_of(rank)), None, TOLERANCE)


HOST = Host(
    load=splade,
    losses=LOSSES,
    step_of_rank=step_of_rank,
    transformer=transformer_of,
    decided_by=lambda model: hidden_states_of(transformer_of(model)),
    families=dict.fromkeys(FAMILIES[1:]),
    watch=watch_decoder,
    watches_stock=True,
    changes={"masked_lm": True},
    trainer=(SparseEncoderTrainer, SparseEncoderTrainingArguments),
)
