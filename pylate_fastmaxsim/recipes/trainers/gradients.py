"""The concentration of gradients, logged while a model of late interaction of texts is trained."""

from __future__ import annotations

from collections.abc import Callable

from transformers import Trainer

from pylate_fastmaxsim.pooling import Max
from pylate_fastmaxsim.recipes.config.schema import Recipe
from pylate_fastmaxsim.recipes.models.retriever import retriever_of
from pylate_fastmaxsim.recipes.scores import ScoreMetric
from pylate_fastmaxsim.recipes.trainers.callbacks import LogGradientConcentration
from pylate_fastmaxsim.tokens import TokenBatch

# Pairs of which gradients are measured: few, so that it costs less than a step.
MEASURED_PAIRS = 32


def text_gradient_logger(
    recipe: Recipe, trainer: Trainer, metric: Callable[[], ScoreMetric]
) -> LogGradientConcentration:
    """The callback of ``training.log_gradient_concentration``, on the first rows of the training data.

    The loss that it measures is that of the recipe if it is contrastive, but over these pairs. Of a distillation it
    measures only scores, of the query and the first of its documents. The pooling is that of the loss,
    whose score ``metric`` is asked for in each measurement.
    """
    rows = trainer.train_dataset[:MEASURED_PAIRS]
    queries, documents, *_ = rows.values()
    documents = [one if isinstance(one, str) else one[0] for one in documents]

    def encode_pairs() -> tuple[TokenBatch, TokenBatch]:
        retriever = retriever_of(trainer.model)
        return (
            retriever.encode(queries, MEASURED_PAIRS, is_query=True),
            retriever.encode(documents, MEASURED_PAIRS, is_query=False),
        )

    return LogGradientConcentration(
        trainer,
        encode_pairs,
        recipe.training.log_gradient_concentration,
        pooling=Max() if recipe.loss.pooling is None else lambda: metric().pooling,
        temperature=None if recipe.loss.name == "distillation" else recipe.loss.temperature or 1.0,
    )
