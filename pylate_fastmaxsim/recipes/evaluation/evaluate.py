"""Evaluate a model on what its recipe names."""

from __future__ import annotations

import logging

from pylate_fastmaxsim.recipes.backend import backend
from pylate_fastmaxsim.recipes.config.schema import Recipe
from pylate_fastmaxsim.recipes.evaluation.finite import NotFiniteError
from pylate_fastmaxsim.recipes.evaluation.targets import RecipeData
from pylate_fastmaxsim.recipes.models.retriever import Retriever

logger = logging.getLogger(__name__)


def evaluate(recipe: Recipe, model: Retriever, data: RecipeData) -> dict[str, float | None]:
    """The metrics of the recipe's evaluation by name; nDCG@10 is None where it has none.

    All are None where the model's embeddings are not finite: an order of such scores is arbitrary, and the metrics of
    it look like any others.
    """
    if data.held_out is data.collection is data.nano_beir is None:
        return {"ndcg@10": None}
    kind = backend(recipe.model, __package__)
    try:
        return kind.evaluate(recipe, model, data)
    except NotFiniteError:
        logger.warning(
            "The evaluation has no metrics: embeddings of the model are NaN or infinite, as after a training that diverged."
        )
        return dict.fromkeys(kind.names_of_metrics(recipe, data))
