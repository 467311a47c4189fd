"""Evaluation of text encoders: a collection, NanoBEIR or rows that were held out."""

from __future__ import annotations

from pylate.models import ColBERT

from pylate_fastmaxsim.recipes.config.schema import Recipe
from pylate_fastmaxsim.recipes.evaluation import held_out
from pylate_fastmaxsim.recipes.evaluation.finite import only_finite
from pylate_fastmaxsim.recipes.evaluation.pooling import pooled_pairs
from pylate_fastmaxsim.recipes.evaluation.pylate_evaluators import (
    evaluate_held_out,
    evaluate_nano_beir,
    nano_beir_evaluator,
)
from pylate_fastmaxsim.recipes.evaluation.ranking import METRICS, evaluate_collection
from pylate_fastmaxsim.recipes.evaluation.targets import RecipeData
from pylate_fastmaxsim.recipes.pooling import final_pooling

__all__ = ["evaluate", "names_of_metrics", "nano_beir_evaluator"]


def evaluate(recipe: Recipe, model: ColBERT, data: RecipeData) -> dict[str, float]:
    """Metrics by name, of the one of the three that the recipe has."""
    pooling = final_pooling(recipe.loss.pooling)
    with only_finite(model), pooled_pairs(pooling):
        if data.collection is not None:
            section = recipe.evaluation
            return evaluate_collection(model, data.collection, section.batch_size, pooling, section.corpus_format)
        if data.nano_beir is not None:
            return evaluate_nano_beir(model, data.nano_beir)
        return evaluate_held_out(recipe, model, data.held_out)


def names_of_metrics(recipe: Recipe, data: RecipeData) -> list[str]:
    """The names of what :func:`evaluate` returns."""
    return list(METRICS) if data.held_out is None else held_out.names_of_metrics(recipe, data.held_out)
