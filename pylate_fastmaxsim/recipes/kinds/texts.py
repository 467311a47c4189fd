"""Kinds of text encoders: what all share, and those that are trained with Sentence Transformers alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from datasets import Dataset
from sentence_transformers import SentenceTransformerTrainingArguments
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback

from pylate_fastmaxsim.comparison.trainer import count_tokens
from pylate_fastmaxsim.integrations.sparse_encoder.names import Router
from pylate_fastmaxsim.losses import Matryoshka
from pylate_fastmaxsim.pooling import Max
from pylate_fastmaxsim.recipes.config.schema import LossSection, Recipe
from pylate_fastmaxsim.recipes.data.text import LABEL_COLUMNS, fit_to_loss
from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.kind import Kind
from pylate_fastmaxsim.recipes.models.retriever import retriever_of
from pylate_fastmaxsim.recipes.pooling import FollowSchedule
from pylate_fastmaxsim.recipes.trainers.gradients import LogGradientConcentration, encode_pairs

# Read by the collators of Sentence Transformers as teacher scores, whatever the loss, or as the name of a data set.
RESERVED = (*LABEL_COLUMNS, "dataset_name", "return_loss")
# Pairs of which gradients are measured: few, so that it costs less than a step.
MEASURED_PAIRS = 32


class TextKind(Kind):
    """A kind of text encoder."""

    recipe_trainer: type[Trainer]  # that of the host, which saves, resumes and returns whole models
    score_attribute: str  # of late interaction, the attribute of a loss that computes its scores
    pads_queries = False  # whether queries are encoded with padding; if not, theirs counts as that of documents

    def gradient_logger(self, recipe: Recipe, trainer: Trainer) -> LogGradientConcentration:
        """The callback of ``training.log_gradient_concentration``, on the first rows of the training data.

        The loss that it measures is that of the recipe if it is contrastive, but over these pairs. Of a distillation it
        measures only scores, of the query and the first of its documents.
        """
        queries, documents, *_ = trainer.train_dataset[:MEASURED_PAIRS].values()
        documents = [one if isinstance(one, str) else one[0] for one in documents]
        pooled = recipe.loss.pooling is not None
        loss = trainer.loss.loss if recipe.loss.pool_factors else trainer.loss
        return LogGradientConcentration(
            trainer,
            partial(encode_pairs, retriever_of(trainer.model), queries, documents),
            recipe.training.log_gradient_concentration,
            pooling=(lambda: getattr(loss, self.score_attribute).pooling) if pooled else Max(),
            temperature=None if recipe.loss.name == "distillation" else recipe.loss.temperature or 1.0,
        )

    def build_trainer(
        self, loss: LossSection, model: nn.Module, rows: Dataset, arguments: SentenceTransformerTrainingArguments
    ) -> Trainer:
        collator, function = self.build_collator(model, rows), self.build_loss(loss, model)
        factors = {"pool_factors": loss.pool_factors, "pool_weights": loss.pool_weights}
        trainer = self.recipe_trainer(
            model=model,
            args=arguments,
            train_dataset=rows,
            loss=function if loss.pool_factors is None else Matryoshka(model, function, **factors),
            data_collator=collator,
            callbacks=self.callbacks(loss, function),
        )
        if loss.pooling is not None and loss.pooling.schedule is not None:
            # Before the callbacks that report what is logged.
            callback = FollowSchedule(loss.pooling, getattr(function, self.score_attribute))
            trainer.callback_handler.callbacks.insert(0, callback)
        return trainer

    def build_collator(self, model: nn.Module, rows: Dataset) -> Callable[[list[dict[str, Any]]], dict[str, Tensor]]:
        """The collator of the host."""
        raise NotImplementedError

    def build_loss(self, section: LossSection, model: nn.Module) -> nn.Module:
        """The loss that a recipe names, with the options that it gives."""
        raise NotImplementedError

    def callbacks(self, section: LossSection, loss: nn.Module) -> list[TrainerCallback] | None:
        """The callbacks that a loss needs."""
        return None

    def count(self, model: nn.Module, inputs: dict[str, Any]) -> dict[str, Any]:
        return count_tokens(inputs, padded=self.pads_queries, encoded=False)


class SentenceTransformersKind(TextKind):
    """A kind whose collator is of Sentence Transformers, which takes columns of texts in their order."""

    host = "Sentence Transformers"
    collator_class: type[Callable[[list[dict[str, Any]]], dict[str, Tensor]]]

    def build_collator(self, model: nn.Module, rows: Dataset) -> EachDocument:
        query, *others = first = spread(next(iter(rows)))
        # Sentence Transformers would look for them in columns of texts, which not all rows have before they are read.
        model.model_card_data.widget = [{"text": text} for text in first.values() if isinstance(text, str)]
        sides = {query: "query", **dict.fromkeys(others, "document")}
        collator = self.collator_class(
            model.preprocess if hasattr(model, "preprocess") else model.tokenize,  # renamed in release 5.4
            router_mapping=sides if isinstance(model[0], Router) else {},
            # Those of the evaluation.
            prompts={column: model.prompts[side] for column, side in sides.items() if model.prompts.get(side)},
        )
        return EachDocument(collator)

    def fit_columns(self, recipe: Recipe, dataset: Dataset) -> Dataset:
        reserved = [column for column in dataset.column_names if column in RESERVED]
        if reserved and recipe.loss.name != "distillation":
            raise RecipeError(
                f"data.columns: {reserved[0]!r} is no text for Sentence Transformers; name only the query, its positive and "
                "any negatives, and rename the column if it holds texts."
            )
        return fit_to_loss(recipe, dataset, RESERVED)


@dataclass
class EachDocument:
    """A collator of Sentence Transformers that is given each document of a list as a column of its own."""

    collator: Callable[[list[dict[str, Any]]], dict[str, Tensor]]

    @property
    def valid_label_columns(self) -> list[str]:
        """Read by the trainer, for batches without duplicates."""
        return self.collator.valid_label_columns

    def __call__(self, features: list[dict[str, Any]]) -> dict[str, Tensor]:
        return self.collator([spread(row) for row in features])


def spread(row: dict[str, Any]) -> dict[str, Any]:
    """A row with a column for each document of a list; lists of scores stay."""
    columns = {}
    for name, value in row.items():
        if isinstance(value, list) and isinstance(value[0], str):
            columns |= {f"{name}_{place}": text for place, text in enumerate(value)}
        else:
            columns[name] = value
    return columns
