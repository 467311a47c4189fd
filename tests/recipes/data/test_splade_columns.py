"""Columns of texts as the collator of Sentence Transformers takes them."""

from __future__ import annotations

import pytest
from datasets import Dataset

from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.load import load_recipe
from pylate_fastmaxsim.recipes.models.load import kind_of
from tests.support.splade_recipe import tiny_splade
from tests.support.tiny_recipe import write

KD = {"documents": ["a", "b"], "scores": [1.0, 0.5]}


@pytest.mark.parametrize(
    ("row", "loss", "sentence"),
    [
        (
            {"a": "q", "label": "d"},
            "contrastive",
            "data.columns: 'label' is no text for Sentence Transformers; name only",
        ),
        ({"a": "q"}, "contrastive", r"data.columns must be the query, its positive and any negatives, got \[a\]."),
        ({"a": "q", "b": 1}, "contrastive", "data.columns: 'b' must hold text, but it holds Value"),
        (
            {"q": "q", "scores": [1.0]},
            "distillation",
            r"must be \[query, documents, scores\] for distillation, got \[q, sc",
        ),
        (
            {"q": "q", **KD, "scores": [1.0]},
            "distillation",
            "every row must have 2 documents and a score for each, but ",
        ),
    ],
)
def test_columns_that_do_not_fit_are_refused(row, loss, sentence, tmp_path):
    recipe = load_recipe(write(tmp_path, tiny_splade(tmp_path, loss={"name": loss})))
    with pytest.raises(RecipeError, match=sentence):
        kind_of(recipe.model).fit_columns(recipe, Dataset.from_list([row]))


def test_names_are_free_otherwise(tmp_path):
    for loss, row in {"contrastive": {"a": "q", "b": "d", "query": "n"}, "distillation": {"a": "q", **KD}}.items():
        override = [f"data.columns=[{', '.join(row)}]"]
        recipe = load_recipe(write(tmp_path, tiny_splade(tmp_path, loss={"name": loss})), override)
        kind_of(recipe.model).fit_columns(recipe, Dataset.from_list([row]))
