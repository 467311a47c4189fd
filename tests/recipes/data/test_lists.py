"""Lists of positives and negatives, columns of negatives with gaps, and names of columns as Sentence Transformers has them."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import pytest
from datasets import Dataset, Value

from pylate_fastmaxsim.recipes.config.schema import DataSection, MiningSection
from pylate_fastmaxsim.recipes.data.rows import load_rows
from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.kinds.colbert import KIND
from pylate_fastmaxsim.recipes.load import load_recipe
from pylate_fastmaxsim.recipes.mining.pairs import load_pairs
from pylate_fastmaxsim.recipes.models.load import kind_of
from pylate_fastmaxsim.recipes.training.train import train
from tests.support.tiny_recipe import text, tiny, write


def rows_of(folder: Path, rows: list[dict], *overrides: str, **sections) -> Dataset:
    Dataset.from_list(rows).to_parquet(folder / "rows.parquet")
    values = tiny(folder, data={"files": [str(folder / "rows.parquet")]}, **sections)
    recipe = load_recipe(write(folder, values), overrides)
    return load_rows(recipe, kind_of(recipe.model))


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


READS = ["table", "stream", "pairs"]


def read_by(how: str, folder: Path, rows: list[dict], **data) -> list[list]:
    """The values of each row, without the query, as a table, as a stream, or the positives of pairs to mine with."""
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    if how == "pairs":
        rows = [{name: value for name, value in row.items() if name != "neg"} for row in rows]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        pairs = load_pairs(MiningSection(pairs=DataSection("files", files=[str(file)], **data), teacher="t"))
        return [[text] for text in pairs.documents["text"][:]]
    values = tiny(folder, data={"files": [str(file)], "streaming": how == "stream", **data})
    values["evaluation"] = {"rows": 0}
    values["model"] = {"name_or_path": "none"}
    values["training"]["per_device_train_batch_size"] = 1
    loaded = load_rows(load_recipe(write(folder, values)), KIND)
    return [list(row.values())[1:] for row in islice(loaded, 1)]


@pytest.mark.parametrize("how", READS)
@pytest.mark.parametrize("key", ["text", "body", "content", "contents", "passage", "passage_text", "abstract"])
def test_the_text_of_a_passage_is_found_by_its_key(key, how, tmp_path):
    rows = [
        {
            "query": "why do bees dance",
            "pos": {"title": "Bees", key: "Bees dance.", "docid": "7"},
            "neg": [{"title": "Bread", key: "It rises."}, {"title": None, key: "It sours.", "url": "u"}],
        }
    ]
    own = {"text_key": key} if key == "abstract" else {}
    (found,) = read_by(how, tmp_path, rows, **own)
    assert found == ["Bees Bees dance.", "Bread It rises.", "It sours."][: len(found)]
    assert len(found) == (1 if how == "pairs" else 3)
    if own:
        section = "mining.pairs" if how == "pairs" else "data"
        sentence = f"^{section}.text_key must name the key .*: '(pos|neg)' of row 0 has the keys title, abstract, "
        with pytest.raises(RecipeError, match=sentence):
            read_by(how, tmp_path, rows)


@pytest.mark.parametrize("how", READS[:2])
@pytest.mark.parametrize(
    ("passages", "sentence"),
    [
        (
            [{"text": "a"}, {"title": "B", "summary": "b"}],
            "data.text_key .* 'neg' of row 0 has the keys title, summary, ",
        ),
        ([{"text": "a"}, {"title": "B"}], "data.text_key .* has the keys title, of which none is among text, "),
        ([{"body": "a", "content": "b"}], "data.text_key .* has the keys body, content, of which several are"),
        ([{"text": ["a", "b"]}], r"data.columns: text and title must be texts, but 'neg' of row 0 has \['a', 'b'\]"),
    ],
)
def test_a_passage_whose_text_is_not_known_is_refused_beside_others(passages, sentence, how, tmp_path):
    with pytest.raises(RecipeError, match=f"^{sentence}"):
        read_by(how, tmp_path, [{"query": "q", "pos": ["p"], "neg": passages}])


@pytest.mark.parametrize("how", READS[:2])
def test_passages_and_texts_may_stand_in_one_list_and_a_text_may_be_empty(how, tmp_path):
    negatives = ["a", {"title": "B", "text": "b"}, {"text": "c", "body": "x"}, {"title": "D", "text": ""}, {"text": ""}]
    assert read_by(how, tmp_path, [{"query": "q", "pos": "p", "neg": negatives}]) == [["p", "a", "B b", "c", "D"]]


@pytest.mark.parametrize("how", READS[:2])
def test_negatives_of_several_systems_are_chosen(how, tmp_path):
    found = {"bm25": ["a", "b"], "dense": ["b", {"title": "C", "body": "c"}]}
    rows = [{"query": "q", "pos": ["p"], "neg": found}]
    assert read_by(how, tmp_path, rows) == [["p", "a", "b", "C c"]]
    assert read_by(how, tmp_path, rows, negatives=["dense"]) == [["p", "b", "C c"]]
    assert read_by(how, tmp_path, rows, negatives=["dense", "bm25"], negatives_per_query=4) == [
        ["p", "b", "C c", "a", "b"]
    ]
    sentence = "^data.negatives must name systems that 'neg' has in the first row .bm25, dense., got splade."
    with pytest.raises(RecipeError, match=sentence):
        read_by(how, tmp_path, rows, negatives=["bm25", "splade"])
    with pytest.raises(RecipeError, match="^data.negatives must name systems .*it has none"):
        read_by(how, tmp_path, [{"query": "q", "pos": "p", "negative": "a"}], negatives=["bm25"])


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
    sections = (
        {"model": {"kind": "splade"}, "loss": {"regularizers": {"document_weight": 1e-3}}} if kind == "splade" else {}
    )
    overrides = ["data.negatives_per_query=2", "data.columns=[question, answer, wrong]"]
    loaded = rows_of(tmp_path, rows, *overrides, **sections)
    assert loaded.column_names == [
        "query" if kind == "colbert" else "question",
        *("positive", "negative_1", "negative_2"),
    ]
    recipe = load_recipe(tmp_path / "tiny.yaml", [*overrides, "training.max_steps=2", "evaluation.rows=0"])
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
            "data.columns must be given where columns .* found the query 'query', the positive 'pos', the negatives 'neg', "
            r"and 'neg_scores'; for example .query, pos, neg.\.$",
        ),
        (
            {"query": "q", "positive_1": "p", "positive_2": "p", "negative": "n"},
            "data.columns must be given where columns .* and 'positive_2'; for example .query, positive_1, negative.",
        ),
        (
            {"question": "q", "title": "t", "positive": "p", "hardNeg1": "n", "language": "en"},
            "data.columns must .* the negatives 'hardNeg1', and 'positive', 'language'; .* .question, positive, hardNeg1.",
        ),
        (
            {"query": "q", "negative": "n"},
            "data.columns must be given where the data has 'negative' in the place of the positive, behind 'query'",
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
        load_rows(load_recipe(write(tmp_path, values)), KIND)


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
