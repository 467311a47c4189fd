"""What kinds of text encoders share, and those that are trained with Sentence Transformers alone."""

from __future__ import annotations

from typing import Any

from datasets import Dataset
from torch import nn
from transformers import Trainer

from pylate_fastmaxsim.recipes.config.schema import LossSection, ModelSection, Recipe
from pylate_fastmaxsim.recipes.data.text import require_a_score_each, require_text, scores_as_floats
from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.kind import Kind
from pylate_fastmaxsim.recipes.models.encoder import check_query_and_document_length, encoder_of
from pylate_fastmaxsim.recipes.scores import ScoreMetric
from pylate_fastmaxsim.recipes.trainers.documents import spread
from pylate_fastmaxsim.recipes.trainers.schedule import FollowSchedule

# Read as teacher scores by the collators of Sentence Transformers, whatever the loss, or as the name of a data set.
RESERVED = ("label", "labels", "score", "scores", "dataset_name", "return_loss")


class TextKind(Kind):
    """A kind of text encoder."""

    def check_lengths(self, section: ModelSection, model: nn.Module) -> None:
        check_query_and_document_length(section, encoder_of(model))

    def count(self, trainer: Trainer, inputs: dict[str, Any]) -> dict[str, Any]:
        (queries, *documents), _ = trainer.collect_features(inputs)
        return {
            "query_tokens": self.tokens(queries),
            "documents": sum(map(self.texts, documents)),
            "live": sum(map(self.tokens, documents)),
        }

    def texts(self, column: dict[str, Any]) -> int:
        """How many texts a column of a batch has."""
        return len(column["attention_mask"])

    def tokens(self, column: dict[str, Any]) -> Any:
        """How many tokens they have."""
        return column["attention_mask"].sum()


class SentenceTransformersKind(TextKind):
    """A kind whose collator is of Sentence Transformers, which takes columns of texts in their order."""

    host = "sentence-transformers"

    def fitted(self, recipe: Recipe, dataset: Dataset) -> Dataset:
        """Refuse columns that do not fit the loss, or that the collator would not take as texts."""
        query, *others = columns = dataset.column_names
        reserved = [column for column in columns if column in RESERVED]
        if recipe.loss.name == "distillation":
            if len(others) != 2 or reserved != others[1:]:
                raise RecipeError(
                    f"data.columns must be [query, documents, scores] for distillation, got [{', '.join(columns)}]."
                )
            require_text(dataset, [query], "data")
            require_a_score_each(dataset, *others)
            return scores_as_floats(dataset)
        if reserved:
            raise RecipeError(
                f"data.columns: {reserved[0]!r} is no text for Sentence Transformers; name only the query, its positive and "
                "any negatives, and rename the column if it holds texts."
            )
        if not others:
            raise RecipeError(f"data.columns must be the query, its positive and any negatives, got [{query}].")
        require_text(dataset, columns, "data")
        return dataset


def texts_in_columns(model: nn.Module, rows: Dataset) -> dict[str, Any]:
    """The first row with a column for each text, of which the card of the model shows the texts."""
    first = spread(next(iter(rows)))
    # Sentence Transformers would look for them in columns of texts, which not all rows have before they are read.
    model.model_card_data.widget = [{"text": text} for text in first.values() if isinstance(text, str)]
    return first


def following_schedule(trainer: Trainer, loss: LossSection, metric: ScoreMetric) -> Trainer:
    """A trainer that changes the pooling of its loss as the recipe says."""
    if loss.pooling is not None and loss.pooling.schedule is not None:
        # Before the callbacks that report what is logged.
        trainer.callback_handler.callbacks.insert(0, FollowSchedule(loss.pooling, metric))
    return trainer
