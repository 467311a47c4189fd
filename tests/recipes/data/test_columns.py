"""Columns of the data: which are texts, for training and for evaluation alike."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pylate.utils import ColBERTCollator

from pylate_fastmaxsim.recipes.config.schema import DataSection, Recipe
from pylate_fastmaxsim.recipes.data.rows import load_columns
from pylate_fastmaxsim.recipes.data.text import check_first
from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.load import load_recipe
from pylate_fastmaxsim.recipes.training.inputs import load_data
from pylate_fastmaxsim.recipes.training.train import train
from tests.support.tiny_recipe import text, tiny, write

ROWS = 30
PAIRS = [{"query": text(i, 4), "positive": f"{text(i, 4 + i % 17)} number {i}"} for i in range(ROWS)]
TAUGHT = [{"query": text(i, 4), "documents": [text(i, 5), text(i + 1, 6)], "scores": [1.0, 0.5]} for i in range(ROWS)]


def write_rows(folder: Path, rows: list[dict]) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def recipe_of(folder: Path, rows: list[dict], *overrides: str, loss: str = "contrastive") -> Recipe:
    recipe = tiny(folder, data={"files": [write_rows(folder, rows)]}, loss={"name": loss}, evaluation={"rows": 10})
    recipe["training"] |= {"max_steps": 2, "save_steps": None}
    return load_recipe(write(folder, recipe), overrides)


@pytest.mark.parametrize(("rows", "loss"), [(PAIRS, "contrastive"), (TAUGHT, "distillation")])
def test_columns_that_the_collator_leaves_out_are_not_evaluated_either(rows, loss, tmp_path):
    ids = [{"query_id": f"q{i}", **row, "document_ids": [f"d{i}"], "dataset_name": "x"} for i, row in enumerate(rows)]
    recipe = recipe_of(tmp_path / "ids", ids, loss=loss)
    data = load_data(recipe)
    assert data.train.column_names == data.held_out.column_names == list(rows[0])
    plain, result = train(recipe_of(tmp_path / "plain", rows, loss=loss)), train(recipe)
    assert result["losses"] == plain["losses"] and result["ndcg@10"] == plain["ndcg@10"] > 0


def test_ids_are_what_the_collator_takes_for_ids(tmp_path):
    names = ["query", "query_id", "_id", "doc_ids", "main_idea", "id", "idea", "ID_", "dataset_name", "dataset", "name"]
    file = write_rows(tmp_path, [dict.fromkeys(names, "a")])
    kept = load_columns(DataSection(source="files", files=[file]), "data").column_names
    collate = ColBERTCollator(lambda texts, **options: {"input_ids": texts})
    collated = [name for name in collate([dict.fromkeys(names, "a")]) if name.endswith("_input_ids")]
    assert [f"{name}_input_ids" for name in kept] == collated
    assert kept == ["query", "id", "idea", "ID_", "dataset", "name"]


@pytest.mark.parametrize(
    ("added", "columns", "loss", "sentence"),
    [
        (
            {"label": "l"},
            None,
            "contrastive",
            "'label' is a column of labels or scores, which the contrastive loss does",
        ),
        (
            {"label": "l", "scores": [1.0]},
            "[query, label, scores]",
            "distillation",
            "must be [query, documents, scores]",
        ),
        (
            {"hard_query": "p"},
            "[query, positive, hard_query]",
            "contrastive",
            "PyLate's collator encodes 'hard_query' as queries",
        ),
        (
            {"anchored": ["p"]},
            "[query, anchored, scores]",
            "distillation",
            "PyLate's collator encodes 'anchored' as quer",
        ),
        ({"positive_id": "p"}, "[query, positive_id]", "contrastive", "PyLate's collator leaves out 'positive_id'"),
        ({"query_id": "q"}, "[query_id, documents, scores]", "distillation", "PyLate's collator leaves out 'query_id'"),
    ],
)
def test_columns_that_the_collator_would_read_otherwise_get_one_sentence(added, columns, loss, sentence, tmp_path):
    rows = [row | added for row in (TAUGHT if loss == "distillation" else PAIRS)]
    overrides = [f"data.columns={columns}"] if columns else []
    with pytest.raises(RecipeError) as error:
        train(recipe_of(tmp_path, rows, *overrides, loss=loss))
    assert str(error.value).startswith("data.columns") and sentence in str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


def test_a_negative_that_stands_where_the_positive_is_read_is_refused_unless_it_is_named(tmp_path):
    rows = [{"query": row["query"], "negative": text(i, 7), **row} for i, row in enumerate(PAIRS)]
    recipe = recipe_of(tmp_path, rows)
    with pytest.raises(
        RecipeError, match="^data.columns must be given where the data has 'negative' before 'positive'"
    ):
        load_data(recipe)
    for columns in (["query", "positive", "negative"], ["query", "negative", "positive"], ["query", "negative"]):
        recipe = recipe_of(tmp_path, rows, f"data.columns=[{', '.join(columns)}]")
        assert load_data(recipe).train.column_names == columns


@pytest.mark.parametrize(
    "columns",
    [
        "anchor positive negative",
        "question answer negative_1 negative_2 negative_10",
        "query pos neg",
        "sent0 sent1 hard_neg",
        "query document negatives",
        "query positive_passages negative_passages",
        "query_id query positive_id positive bm25_negatives hardNeg2",
        "anchor positive",
        "title text",
    ],
)
def test_names_that_data_sets_have_for_negatives_need_no_columns(columns, tmp_path):
    rows = [{name: text(n, 5) for n, name in enumerate(columns.split())}]
    recipe = recipe_of(tmp_path, rows)
    check_first(recipe, dict.fromkeys(load_columns(recipe.data, "data").column_names, "a"))


@pytest.mark.parametrize(("rows", "column"), [(PAIRS, "positive"), (TAUGHT, "documents")])
def test_rows_that_are_not_utf8_get_one_sentence(rows, column, tmp_path):
    recipe = recipe_of(tmp_path, rows, loss="distillation" if rows is TAUGHT else "contrastive")
    file = tmp_path / "rows.jsonl"
    row = dict(rows[17]) | {column: ["a", "caf\xe9"] if column == "documents" else "caf\xe9"}
    lines = file.read_bytes().splitlines(keepends=True)
    lines[17] = json.dumps(row, ensure_ascii=False).encode("latin-1") + b"\n"
    file.write_bytes(b"".join(lines))
    with pytest.raises(RecipeError, match=f"^data.columns: {column!r} must hold texts? in UTF-8, but some "):
        train(recipe)
    assert not (tmp_path / "out").exists()


def test_rows_without_a_document_beside_the_ids_get_one_sentence(tmp_path):
    rows = [{"query": f"q{i}", "main_idea": f"d{i}"} for i in range(ROWS)]  # it has _id in its name
    with pytest.raises(
        RecipeError, match="^data.columns must be the query, its positive and .* got .query.; a column "
    ):
        train(recipe_of(tmp_path, rows))
