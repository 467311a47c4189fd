"""Rows that do not fit a recipe are one sentence that names the key."""

from __future__ import annotations

from pathlib import Path

import pytest
from datasets import Dataset

from pylate_fastmaxsim.recipes.data.rows import load_rows
from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.kinds.colbert import KIND
from pylate_fastmaxsim.recipes.load import load_recipe
from tests.support.tiny_recipe import text, tiny, write


def refusal(folder: Path, **sections) -> str:
    with pytest.raises(RecipeError) as error:
        load_rows(load_recipe(write(folder, tiny(folder, **sections))), KIND)
    return str(error.value)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"scores": [0.5, 0.2]}, "and a score for each, but row 5 has 3 and 2 scores."),
        ({"documents": None, "scores": None}, "and a score for each, but row 5 has 0 and 0 scores."),
        ({"documents": ["a", None, "c"]}, "'documents' must hold texts, but some are missing."),
        ({"query": None}, "'query' must hold a text in every row, but some have none."),
        ({"scores": [0.5, None, 0.1]}, "'scores' must hold finite numbers, but some are missing."),
        ({"scores": [0.5, float("nan"), 0.1]}, "'scores' must hold finite numbers, but some are nan or infinite."),
    ],
)
def test_distillation_rows_in_files(wrong, sentence, tmp_path):
    rows = [{"query": text(row, 4), "documents": ["a", "b", "c"], "scores": [0.5, 0.2, 0.1]} for row in range(12)]
    rows[5] |= wrong
    Dataset.from_list(rows).to_parquet(tmp_path / "kd.parquet")
    said = refusal(tmp_path, data={"files": [str(tmp_path / "kd.parquet")]}, loss={"name": "distillation"})
    assert said.startswith("data.columns: ") and said.endswith(sentence)


def test_distillation_rows_in_files_of_other_types(tmp_path):
    for column, values, sentence in (
        ("scores", ["high", "low"], "'scores' must hold lists of finite numbers, but it holds lists of string."),
        ("documents", [1, 2], "'documents' must hold lists of texts, but it holds lists of int64."),
    ):
        row = {"query": "a", "documents": ["a", "b"], "scores": [0.5, 0.2]} | {column: values}
        Dataset.from_list([row] * 12).to_parquet(tmp_path / "kd.parquet")
        said = refusal(tmp_path, data={"files": [str(tmp_path / "kd.parquet")]}, loss={"name": "distillation"})
        assert said == f"data.columns: {sentence}"
