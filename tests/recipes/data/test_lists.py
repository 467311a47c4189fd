"""Lists of positives and negatives, columns of negatives with gaps, and names of columns as Sentence Transformers has them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from datasets import Dataset, Value
from tiny_recipe import text, tiny, write

from pylate_fastmaxsim.recipes.config.schema import DataSection, MiningSection
from pylate_fastmaxsim.recipes.data.rows import load_rows
from pylate_fastmaxsim.recipes.data.streaming import stream_rows
from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.load import load_recipe
from pylate_fastmaxsim.recipes.mining.pairs import load_pairs
from pylate_fastmaxsim.recipes.training.train import train


def rows_of(folder: Path, rows: list[dict], *overrides: str, **sections) -> Dataset:
    Dataset.from_list(rows).to_parquet(folder / "rows.parquet")
    values = tiny(folder, data={"files": [str(folder / "rows.parquet")]}, **sections)
    return load_rows(load_recipe(write(folder, values), overrides))


def test_each_positive_is_a_row_and_negatives_are_drawn_or_repeated(tmp_path):
    rows = [
        {"query": "q0", "pos": ["p0"], "neg": ["a"]},
        {"query": "q1", "pos": ["p1", "p2"], "neg": ["b", None, "c", "d", "e", "f"]},
    ]
    loaded = rows_of(tmp_path, rows, "data.negatives_per_query=3")
    assert loaded.column_names == ["query", "positive", "negative_1", "negative_2", "negative_3"]
    first, second, third = (list(row.values()) for row in loaded)
    assert first == ["q0", "p0", "a", "a", "a"]
    assert (second[:2], third[:2]) == (["q1", "p1"], ["q1", "p2"])
    for drawn in (second[2:], third[2:]):
        assert second[2:] != third[2:] and len(set(drawn)) == 3 and set(drawn) <= set("bcdef")
    # By the seed, whatever else is in the data.
    alone = rows_of(tmp_path, rows[1:], "data.negatives_per_query=3")
    assert list(alone[0].values()) == second and list(alone[1].values()) == third
    others = {
        tuple(rows_of(tmp_path, rows[1:], "data.negatives_per_query=3", f"data.seed={n}")[0].values()) for n in range(4)
    }
    assert len(others) > 1


@pytest.mark.parametrize(
    ("rows", "columns"),
    [
        ([{"query": "q", "positive": ["p"], "negatives": ["a", "b"]}] * 2, ["negative_1", "negative_2"]),
        ([{"query": "q", "positive": "p", "negatives": ["a"]}] * 2, ["negative"]),
        ([{"query": "q", "positive": ["p"]}] * 2, []),
        ([{"query": "q", "positive": "p", "negative_1": "a", "negative_2": "b"}] * 2, ["negative_1", "negative_2"]),
    ],
)
def test_rows_with_as_many_negatives_each_need_no_key(rows, columns, tmp_path):
    loaded = rows_of(tmp_path, rows)
    assert loaded.column_names == ["query", "positive", *columns]
    assert all(list(row.values()) == ["q", "p", *"ab"[: len(columns)]] for row in loaded)


def test_passages_with_titles_are_texts(tmp_path):
    passages = [{"docid": "1", "title": "Bees", "text": "They fly."}, {"docid": "2", "title": "", "text": "They hum."}]
    row = {"query_id": "7", "query": "q", "positive_passages": passages[:1], "negative_passages": passages}
    loaded = rows_of(tmp_path, [row] * 2, "data.negatives_per_query=2")
    assert loaded.features["positive"] == Value("string")
    assert set(loaded[0].values()) == {"q", "Bees They fly.", "They hum."}


def test_columns_with_gaps_are_negatives_of_rows_that_have_fewer(tmp_path):
    rows = [{"query": "q", "positive": "p", "negative_1": "a", "negative_2": two} for two in ("b", None)]
    loaded = rows_of(tmp_path, rows, "data.negatives_per_query=2")
    assert [list(row.values())[2:] for row in loaded] == [["a", "b"], ["a", "a"]]
    assert rows_of(tmp_path, rows, "data.negatives_per_query=1").column_names == ["query", "positive", "negative"]


@pytest.mark.parametrize(
    ("changed", "overrides", "sentence"),
    [
        ({"neg": ["a"]}, [], "data.negatives_per_query is missing, .*: the first has 2, row 1 has 1."),
        ({"neg": []}, ["data.negatives_per_query=2"], "data.negatives_per_query: row 1 has no negative; leave "),
        ({"pos": []}, ["data.negatives_per_query=2"], "data.columns: row 1 has no text in 'pos'."),
        ({}, ["data.columns=[neg, pos]"], "data.columns: 'neg' is the query and must hold texts, but it holds lists."),
        ({}, ["data={negatives_per_query: 2, columns: [query, pos]}"], "data.negatives_per_query needs a column of "),
        (
            {},
            ["loss.name=distillation", "data.negatives_per_query=2"],
            "data.negatives_per_query does not apply to the dis",
        ),
    ],
)
def test_lists_that_do_not_fit_are_one_sentence(changed, overrides, sentence, tmp_path):
    rows = [{"query": "q", "pos": ["p"], "neg": ["a", "b"]} for _ in range(2)]
    rows[1] |= changed
    overrides = [
        each.replace("data={", f"data={{source: files, files: [{tmp_path}/rows.parquet], ") for each in overrides
    ]
    with pytest.raises(RecipeError, match=f"^{sentence}"):
        rows_of(tmp_path, rows, *overrides)


@pytest.mark.parametrize("kind", ["colbert", "splade"])
def test_the_order_of_columns_counts_where_none_is_named_query(kind, tmp_path):
    rows = [{"question": text(row, 4), "answer": [text(row, 9)], "wrong": [text(row + 1, 8)] * 3} for row in range(12)]
    section = {"kind": "splade", "embedding_size": None, "query_length": None, "document_length": None}
    sections = {"model": section, "loss": {"regularizers": {"document_weight": 1e-3}}} if kind == "splade" else {}
    loaded = rows_of(tmp_path, rows, "data.negatives_per_query=2", **sections)
    assert loaded.column_names == [
        "query" if kind == "colbert" else "question",
        *("positive", "negative_1", "negative_2"),
    ]
    recipe = load_recipe(
        tmp_path / "tiny.yaml", ["data.negatives_per_query=2", "training.max_steps=2", "evaluation.rows=0"]
    )
    assert train(recipe)["steps"] == 2
    swapped = [{"answer": "a", "question": "q"}] * 2
    with pytest.raises(RecipeError, match="^data.columns must be given where the data has 'answer' before 'question'"):
        rows_of(tmp_path, swapped, **sections)
    assert rows_of(tmp_path, swapped, "data.columns=[question, answer]", **sections)[0]["answer"] == "a"


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        (
            {"query": "q", "pos": ["p"], "neg": []},
            "data.negatives_per_query: row 0 has no negative; leave such rows out",
        ),
        ({"text": "p", "query": "q"}, "data.columns must be given where the data has 'text' before 'query'"),
        (
            {"positive": "p", "query": "q", "neg": ["n"]},
            "data.columns must be given where the data has 'positive' before",
        ),
        (
            {"Positive": "p", "Question": "q"},
            "data.columns must be given where the data has 'Positive' before 'Question'",
        ),
        (
            {"query": "q", "neg": ["n"], "pos": ["p"]},
            "data.columns must be given where the data has 'neg' before 'pos'",
        ),
        (
            {"query": "q", "pos": "p", "neg": ["n"], "label": "1"},
            "data.columns: 'label' is a column of labels or scores",
        ),
        (
            {"query": "q", "pos": "p", "neg": "n", "score": "0.5"},
            "data.columns: 'score' is a column of labels or scores",
        ),
        (
            {"query": "q", "pos": "p", "neg": ["n"], "neg_scores": [0.5]},
            "data.columns: 'neg_scores' must hold texts, but ",
        ),
        (
            {"query": "12", "pos": "34", "neg": "56"},
            "data.collection is missing: 'query' and the other columns hold ids",
        ),
    ],
)
@pytest.mark.parametrize("streaming", [False, True])
def test_columns_in_another_order_or_of_no_texts_are_refused(row, sentence, streaming, tmp_path):
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(row)}\n" * 4)
    values = tiny(tmp_path, data={"files": [str(tmp_path / "rows.jsonl")]})
    if streaming:
        values["data"]["streaming"], values["evaluation"] = True, {"rows": 0}
        values["model"] = {"name_or_path": "none"}
    with pytest.raises(RecipeError, match=f"^{sentence}"):
        (stream_rows if streaming else load_rows)(load_recipe(write(tmp_path, values)))


def test_a_query_may_be_called_positive_where_columns_are_named(tmp_path):
    rows = [{"positive": "q", "similar": ["p"], "other": ["n"]}] * 2
    loaded = rows_of(tmp_path, rows, "data.columns=[positive, similar, other]")
    assert loaded[0] == {"query": "q", "positive": "p", "negative": "n"}


def test_fewer_rows_than_a_batch_are_said(tmp_path, caplog):
    file = write(tmp_path, tiny(tmp_path, training={"max_steps": 1, "per_device_train_batch_size": 64}))
    overrides = ["training.dataloader_drop_last=false", "evaluation.rows=0"]
    assert train(load_recipe(file, overrides))["steps"] == 1
    said = (
        "The data has 60 rows to train on, fewer than training.per_device_train_batch_size of 64: every batch has 60."
    )
    assert said in caplog.messages


def test_lists_of_positives_are_mined_as_pairs(tmp_path):
    rows = [{"query": "q0", "pos": ["p0", "p1"]}, {"query": "q1", "pos": ["p0"]}]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    section = DataSection(source="files", files=[str(tmp_path / "pairs.jsonl")])
    pairs = load_pairs(MiningSection(pairs=section, teacher="t"))
    assert pairs.positives() == [{0, 1}, {0}]
