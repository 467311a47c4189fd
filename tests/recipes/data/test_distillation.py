import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from datasets import Dataset
from pylate.utils import KDProcessing

from pylate_fastmaxsim.recipes.data import ids
from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.load import load_recipe
from pylate_fastmaxsim.recipes.training.inputs import load_data
from tests.support.case_tables import case_table
from tests.support.tiny_recipe import hub_dataset, json_lines, kd_subsets, tiny, write


def write_files(folder, subsets: dict[str, list[dict]]):
    folder.mkdir()
    for name, rows in subsets.items():
        json_lines(folder / f"{name}.jsonl", rows)
    return folder


def load(tmp_path, name, *overrides: str) -> Dataset:
    recipe = tiny(tmp_path, loss={"name": "distillation"}, evaluation={"rows": 0})
    recipe["data"] = {"source": "distillation", "name": str(name)}
    return load_data(load_recipe(write(tmp_path, recipe), overrides)).train


def by_query(rows) -> list[tuple]:
    return sorted((row["query"], row["documents"], [round(score, 5) for score in row["scores"]]) for row in rows)


@pytest.mark.parametrize("form", ["jsonl", "parquet", "hub", "lists as text", "numbers as ids"])
def test_rows_are_those_of_pylate(form, tmp_path):
    subsets, folder = kd_subsets(), tmp_path / "data"
    train, queries, documents = (Dataset.from_list(subsets[name]) for name in ("train", "queries", "documents"))
    train.set_transform(KDProcessing(queries, documents, n_ways=4).transform)
    expected = by_query(train)
    if form == "lists as text":
        for row in subsets["train"]:
            row |= {name: str(row[name]) for name in ("document_ids", "scores")}
    if form == "numbers as ids":
        for row in subsets["documents"]:
            row["document_id"] = int(row["document_id"][1:])
        for row in subsets["train"]:
            row["document_ids"] = [number[1:] for number in row["document_ids"]]
    if form == "parquet":
        for name, rows in subsets.items():
            Dataset.from_list(rows).to_parquet(folder / f"{name}.parquet")
    elif form == "hub":
        hub_dataset(folder, **subsets)
    else:
        write_files(folder, subsets)
    rows = load(tmp_path, folder, "data.n_ways=4")
    assert rows.column_names == ["query", "documents", "scores"]
    assert by_query(rows) == expected and len(expected) == 24
    batch = rows[:3]
    assert [batch[name][2] for name in rows.column_names] == [rows[2][name] for name in rows.column_names]
    assert {len(row["documents"]) for row in load(tmp_path, folder)} == {5}


def test_lists_of_a_fixed_size_are_lists_and_scores_may_be_integers(tmp_path):
    subsets = kd_subsets()
    for row in subsets["train"]:
        row["scores"] = list(map(round, row["scores"]))
    expected = by_query(load(tmp_path, write_files(tmp_path / "data", subsets)))
    columns = {"query_id": pa.string(), "document_ids": pa.list_(pa.string(), 5), "scores": pa.list_(pa.int8(), 5)}
    pq.write_table(pa.Table.from_pylist(subsets["train"], pa.schema(columns)), tmp_path / "data" / "train.parquet")
    (tmp_path / "data" / "train.jsonl").unlink()
    rows = load(tmp_path, tmp_path / "data")
    assert by_query(rows) == expected and all(isinstance(score, float) for score in rows[0]["scores"])


def test_only_row_numbers_are_kept_and_they_are_made_once(tmp_path, monkeypatch):
    folder = write_files(tmp_path / "data", kd_subsets(rows=25))
    first = load(tmp_path, folder)
    stored = first.with_format(None)[0]
    assert isinstance(stored["query"], int) and all(isinstance(row, int) for row in stored["documents"])
    monkeypatch.setattr(ids, "as_text", lambda *arguments: pytest.fail("looked up again"))
    assert by_query(load(tmp_path, folder)) == by_query(first)


# What the fourth row of a subset has in place of its own values.
@case_table("""
subset | values | sentence
train | {query_id: q99} | 'query_id' of the subset train has q99, which is not in the subset queries.
train | {document_ids: ['1', '2', '3', '4', x]} | 'document_ids' of the subset train has 1, which is not in the
train | {scores: [0.1, 0.2]} | the row of query_id q21 has 5 document_ids but 2 scores; it must have
train | {scores: [0.1, 0.2, 0.3, 0.4, null]} | must be finite numbers
documents | {document_id: null} | 'document_id' of the subset documents must hold ids, but some are
documents | {document_id: d58} | 'document_id' of the subset documents must stand for one text each, but d58 has several.
queries | {text: null} | 'text' of the subset queries must hold a text in every row, but some have
documents | {text: "caf\\udce9"} | 'text' of the subset documents must hold text in UTF-8, but some
written | {scores: "['n/a', '1', '2', '3', '4']"} | is text, which is not a list of numbers in the row of query_id q21.
""")
def test_data_that_does_not_fit_gets_one_sentence(subset, values, sentence, tmp_path):
    subsets = kd_subsets()
    if subset == "written":
        for row in subsets["train"]:
            row["scores"] = str(row["scores"])
    subsets["train" if subset == "written" else subset][3] |= yaml.safe_load(values)
    with pytest.raises(RecipeError) as error:
        load(tmp_path, write_files(tmp_path / "data", subsets))
    assert sentence in str(error.value) and "\n" not in str(error.value)


def test_only_the_first_n_ways_documents_are_looked_at(tmp_path):
    subsets = kd_subsets()
    subsets["train"][3]["document_ids"] = ["d1", "d2", "d3", "d4", "unknown"]
    subsets["documents"].append(dict(subsets["documents"][4]))  # twice, with the same text
    assert len(load(tmp_path, write_files(tmp_path / "unknown", subsets), "data.n_ways=4")) == 24
    subsets["train"][3] |= {"scores": [0.1, 0.2], "document_ids": ["d1", "d2"]}
    with pytest.raises(RecipeError, match="^data.n_ways must be at most .* but the row of query_id q21 has 2."):
        load(tmp_path, write_files(tmp_path / "few", subsets), "data.n_ways=4")


def test_missing_columns_and_files_are_named(tmp_path):
    whole = write_files(tmp_path / "whole", subsets := kd_subsets())
    assert len(load(tmp_path, whole, "data.split=train")) == 24
    with pytest.raises(RecipeError, match="data.split must be train for .*, a folder with one file for .* got 'dev'."):
        load(tmp_path, whole, "data.split=dev")
    with pytest.raises(RecipeError, match="data.columns does not apply to data.source distillation"):
        load(tmp_path, whole, "data.columns=[query, documents, scores]")
    subsets["documents"] = [{"id": row["document_id"], "text": row["text"]} for row in subsets["documents"]]
    with pytest.raises(RecipeError, match="the subset documents has no column 'document_id', it has id, text"):
        load(tmp_path, write_files(tmp_path / "renamed", subsets))
    (whole / "documents.jsonl").unlink()
    with pytest.raises(RecipeError, match="must hold documents.jsonl or documents.parquet .*, or a README.md"):
        load(tmp_path, whole)
