"""Evaluate a model on what its recipe names."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from typing import TYPE_CHECKING

from pylate.models import ColBERT

from pylate_fastmaxsim.recipes.config.schema import Recipe
from pylate_fastmaxsim.recipes.evaluation.beir import METRICS, evaluate_collection
from pylate_fastmaxsim.recipes.evaluation.finite import NotFiniteError, only_finite
from pylate_fastmaxsim.recipes.evaluation.held_out import evaluate_held_out, names_of_metrics
from pylate_fastmaxsim.recipes.evaluation.nano_beir import evaluate_nano_beir
from pylate_fastmaxsim.recipes.evaluation.targets import RecipeData

if TYPE_CHECKING:
    from pylate_fastmaxsim.recipes.models.visual import VisualRetriever


logger = logging.getLogger(__name__)


def evaluate(recipe: Recipe, model: ColBERT | VisualRetriever, data: RecipeData) -> dict[str, float | None]:
    """The metrics of the recipe's evaluation by name; nDCG@10 is None where it has none.

    All are None where the model's embeddings are not finite: an order of such scores is arbitrary, and the metrics of
    it look like any others.
    """
    try:
        with nullcontext() if recipe.model.visual else only_finite(model):
            return _evaluate(recipe, model, data)
    except NotFiniteError:
        logger.warning(
            "The evaluation has no metrics: embeddings of the model are NaN or infinite, as after a training that diverged."
        )
    if recipe.model.visual:
        return {"ndcg@10": None}
    return dict.fromkeys(METRICS if data.held_out is None else names_of_metrics(recipe, data.held_out))


def _evaluate(recipe: Recipe, model: ColBERT | VisualRetriever, data: RecipeData) -> dict[str, float | None]:
    if data.collection is not None:
        return evaluate_collection(model, data.collection, recipe.evaluation.batch_size)
    if data.nano_beir is not None:
        return evaluate_nano_beir(model, data.nano_beir)
    if data.held_out is None:
        return {"ndcg@10": None}
    if recipe.model.visual:
        from pylate_fastmaxsim.recipes.models.visual import evaluate_pages

        return evaluate_pages(model, data.held_out, recipe.evaluation.batch_size)
    return evaluate_held_out(recipe, model, data.held_out)
