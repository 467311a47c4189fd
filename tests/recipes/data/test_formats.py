"""Files as people have them: compressed, CSV, TSV with and without names, and ColBERT's triples of ids."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from datasets import Dataset

from pylate_fastmaxsim.recipes.config.schema import DataSection
from pylate_fastmaxsim.recipes.data.rows import load_columns, load_rows
from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.kinds.colbert import KIND
from pylate_fastmaxsim.recipes.load import load_recipe
from pylate_fastmaxsim.recipes.training.train import train
from tests.support.tiny_recipe import text, tiny, write

# Quotes and names of missing values are texts, and an id is no number.
ROWS = [{"query": f"00{n}", "positive": text(n, 6), "negative": ['"NA', "null", "a, b"][n % 3]} for n in range(12)]


def write_lines(file: Path, lines: list[str]) -> str:
    content = "".join(f"{line}\n" for line in lines)
    with gzip.open(file, "wt") if file.suffix == ".gz" else open(file, "w") as stream:
        stream.write(content)
    return str(file)


def write_rows(file: Path, header: bool = True) -> str:
    if file.suffix == ".parquet":
        Dataset.from_list(ROWS).to_parquet(file)
        return str(file)
    if ".tsv" in file.suffixes:
        lines = [list(ROWS[0])] * header + [list(row.values()) for row in ROWS]
        return write_lines(file, ["\t".join(line) for line in lines])
    if ".csv" in file.suffixes:
        Dataset.from_list(ROWS).to_csv(file.with_name("plain.csv"))
        return write_lines(file, file.with_name("plain.csv").read_text().splitlines())
    if file.suffix == ".json":
        file.write_text(json.dumps(ROWS))
        return str(file)
    return write_lines(file, [json.dumps(row) for row in ROWS])


@pytest.mark.parametrize(
    "name", ["a.parquet", "a.jsonl", "a.jsonl.gz", "a.json", "a.csv", "a.csv.gz", "a.tsv", "a.tsv.gz", "bare.tsv"]
)
def test_all_types_of_files_have_the_same_rows(name, tmp_path):
    file = write_rows(tmp_path / name, header=name != "bare.tsv")
    assert load_columns(DataSection("files", files=[file]), "data").to_list() == ROWS


def test_a_line_of_names_is_known_by_what_it_begins_with_or_by_the_columns(tmp_path):
    lines = ["text\tsource", *(f"{text(n, 5)}\t{n}" for n in range(3))]
    corpus = DataSection("files", files=[write_lines(tmp_path / "corpus.tsv", lines)], columns=["text"])
    assert load_columns(corpus, "data")[:]["text"] == [text(n, 5) for n in range(3)]
    # A collection to mine in, as MS MARCO has it.
    lines = [f"{n}\t{text(n, 5)}" for n in range(3)]
    corpus = DataSection("files", files=[write_lines(tmp_path / "collection.tsv", lines)])
    assert load_columns(corpus, "mining.corpus").to_list() == [{"text": text(n, 5)} for n in range(3)]


@pytest.mark.parametrize(
    ("name", "lines", "sentence"),
    [
        (
            "a.csv",
            ["query,positive", "q,p,x"],
            "data.files: the first row of .*a.csv has 2 values, but the second has 3: q, ",
        ),
        (
            "a.csv",
            [",query,positive", "0,q,p"],
            "data.files: the first line of .*a.csv must name each of its columns once",
        ),
        ("a.csv", ["query,positive"], "data.* there are no rows"),
        (
            "a.tsv",
            ["positive\tquery", "p\tq"],
            "data.columns must be given where the data has 'positive' before 'query'",
        ),
    ],
)
def test_values_under_the_name_of_another_column_are_refused(name, lines, sentence, tmp_path):
    values = tiny(tmp_path, data={"files": [write_lines(tmp_path / name, lines)]})
    with pytest.raises(RecipeError, match=f"^{sentence}"):
        load_rows(load_recipe(write(tmp_path, values)), KIND)


def test_each_of_several_files_is_read_by_its_own_names(tmp_path):
    long = "p" * 200_000  # more than the csv module reads by default
    files = [
        write_lines(tmp_path / name, lines)
        for name, lines in {
            "a.csv": ["query,positive", f"q,{long}"],
            "b.csv": ["", "positive,query", "p,q"],
            "c.csv": ["query,positive", "q,p,x"],
            "d.tsv": ["q\tp"],
            "e.tsv": ["query\tpositive", "q\tp"],
        }.items()
    ]
    assert load_columns(DataSection("files", files=files[:2]), "data").to_list() == [
        {"query": "q", "positive": long},
        {"query": "q", "positive": "p"},
    ]
    with pytest.raises(RecipeError, match="^data.files: the first row of .*c.csv has 2 values, but the second has 3: "):
        load_columns(DataSection("files", files=files[:3]), "data")
    with pytest.raises(
        RecipeError, match="^data.files: the first line must name the columns in all files or in none, "
    ):
        load_columns(DataSection("files", files=files[3:]), "data")


def test_the_index_that_pandas_writes_is_no_column(tmp_path):
    Dataset.from_list([{"query": "q", "positive": "p", "__index_level_0__": 3}]).to_parquet(tmp_path / "a.parquet")
    data = DataSection("files", files=[str(tmp_path / "a.parquet")], collection="c.tsv")
    assert load_columns(data, "data").column_names == ["query", "positive"]


def tables(folder: Path, queries: str = "queries.tsv", collection: str = "collection.tsv") -> dict[str, str]:
    """The files of a collection and its queries, with ids that are not row numbers."""
    folder.mkdir(parents=True, exist_ok=True)
    if queries.endswith(".tsv"):
        write_lines(folder / queries, [f"{100 - n}\tquery {n}" for n in range(12)])
        write_lines(folder / collection, [f"{500 - n}\t{text(n, 9)} {n}\ttitle {n}" for n in range(30)])
    else:
        Dataset.from_list([{"_id": 100 - n, "text": f"query {n}"} for n in range(12)]).to_parquet(folder / queries)
        rows = [{"_id": str(500 - n), "title": f"title {n}", "text": f"{text(n, 9)} {n}"} for n in range(30)]
        write_lines(folder / collection, list(map(json.dumps, rows)))
    return {"queries": str(folder / queries), "collection": str(folder / collection)}


def document(number: int) -> str:
    return f"title {number} {text(number, 9)} {number}"


def of_ids(folder: Path, name: str, lines: list[str], *overrides: str, loss: str = "contrastive", **more) -> Dataset:
    files = {"queries": None, "collection": None} | tables(folder) | more
    section = {"source": "files", "files": [write_lines(folder / name, lines)], **files}
    recipe = tiny(folder, loss={"name": loss}, evaluation={"rows": 0}) | {"data": section}
    return load_rows(load_recipe(write(folder, recipe), overrides), KIND)


@pytest.mark.parametrize("name", ["triples.tsv", "triples.tsv.gz", "triples.jsonl", "named.tsv", "rows.jsonl"])
@pytest.mark.parametrize("others", [{}, {"queries": "queries.parquet", "collection": "collection.jsonl.gz"}])
def test_triples_of_ids_have_the_texts_of_a_collection(name, others, tmp_path):
    ids = [(100 - n, 500 - n, 500 - 2 * n) for n in range(12)]
    form = {
        "rows.jsonl": lambda row: json.dumps(
            {"qid": row[0], "positive_ids": [str(row[1])], "negative_ids": [row[2]] * 3}
        ),
        "triples.jsonl": lambda row: json.dumps(row),
    }
    lines = [form.get(name, lambda row: "\t".join(map(str, row)))(row) for row in ids]
    lines = ["qid\tpid\tnegative"] * (name == "named.tsv") + lines
    more = tables(tmp_path, **others)
    overrides = ["data.negatives_per_query=1"] if name == "rows.jsonl" else []
    rows = of_ids(tmp_path, name, lines, *overrides, **more)
    assert [rows[n] for n in range(12)] == [
        {"query": f"query {n}", "positive": document(n), "negative": document(2 * n)} for n in range(12)
    ]


@pytest.mark.parametrize("name", ["train.tsv", "trec.tsv", "spaces.tsv.gz", "qrels.jsonl"])
@pytest.mark.parametrize("overrides", [[], ["data.columns=[query-id, corpus-id]"]])
def test_judgements_are_rows_of_a_query_and_a_relevant_document(name, overrides, tmp_path):
    judged = [(100 - n, 500 - n - step, step - 1) for n in range(6) for step in range(4)]
    if name == "qrels.jsonl":
        lines = [json.dumps({"query-id": str(q), "corpus-id": str(d), "score": grade}) for q, d, grade in judged]
    elif name == "train.tsv":
        lines = ["query-id\tcorpus-id\tscore", *("\t".join(map(str, row)) for row in judged)]
    else:
        separator = "\t" if name == "trec.tsv" else " "
        lines = [separator.join(map(str, (q, 0, d, grade))) for q, d, grade in judged]
        overrides = overrides and ["data.columns=[query-id, corpus-id]"]
    # The collection as BEIR has it; MS MARCO has documents of the ids 0 and 1, as TREC's other columns.
    folder = tables(tmp_path, queries="queries.parquet", collection="corpus.jsonl")
    with open(folder["collection"], "a") as collection:
        collection.writelines(json.dumps({"_id": str(n), "title": "", "text": "another"}) + "\n" for n in (0, 1, 2))
    rows = of_ids(tmp_path, name, lines, *overrides, **folder)
    assert [rows[n] for n in range(len(rows))] == [
        {"query": f"query {n}", "positive": document(n + step)} for n in range(6) for step in (2, 3)
    ]


def test_the_text_of_a_collection_is_found_by_its_column(tmp_path):
    lines = [f"{100 - n}\t{500 - n}\t{499 - n}" for n in range(12)]
    folder = tables(tmp_path)
    for column, overrides in {"contents": [], "abstract": ["data.text_key=abstract"]}.items():
        rows = [{"id": str(500 - n), column: f"text {n}", "title": f"title {n}", "url": "u"} for n in range(13)]
        folder["collection"] = write_lines(tmp_path / f"{column}.jsonl", list(map(json.dumps, rows)))
        loaded = of_ids(tmp_path, "triples.tsv", lines, *overrides, **folder)
        assert loaded[3] == {"query": "query 3", "positive": "title 3 text 3", "negative": "title 4 text 4"}
    with pytest.raises(
        RecipeError, match="^data.collection: .* one of texts .text, body, .* it has id, abstract, title, "
    ):
        of_ids(tmp_path, "triples.tsv", lines, **folder)


def test_several_negatives_and_queries_as_texts(tmp_path):
    lines = [json.dumps([f"what is {n}", 500 - n, 499 - n, "498"]) for n in range(12)]
    rows = of_ids(tmp_path, "triples.jsonl", lines, queries=None)
    assert rows[3] == {
        "query": "what is 3",
        "positive": document(3),
        "negative_1": document(4),
        "negative_2": document(2),
    }
    assert of_ids(tmp_path, "triples.jsonl", lines, "data.negatives_per_query=1", queries=None).column_names == [
        *("query", "positive", "negative")
    ]


def test_scored_tuples_are_distilled(tmp_path):
    lines = [json.dumps([100 - n, *([500 - n - k, 1.5 - k] for k in range(3 + n % 2))]) for n in range(12)]
    rows = of_ids(tmp_path, "examples.json", lines, loss="distillation")
    assert rows[1] == {"query": "query 1", "documents": list(map(document, (1, 2, 3))), "scores": [1.5, 0.5, -0.5]}
    assert len(of_ids(tmp_path, "examples.json", lines, "data.n_ways=2", loss="distillation")[0]["scores"]) == 2
    recipe = load_recipe(tmp_path / "tiny.yaml", ["training.max_steps=2", "data.n_ways=3"])
    assert train(recipe)["steps"] == 2


def test_triples_of_texts_are_read_without_a_collection(tmp_path):
    lines = [json.dumps(list(row.values())) for row in ROWS]
    rows = of_ids(tmp_path, "triples.jsonl", lines, queries=None, collection=None)
    assert rows.column_names == ["query", "positive", "negative"] and rows[5] == ROWS[5]


@pytest.mark.parametrize(
    ("lines", "overrides", "sentence"),
    [
        (["100\t500\t7"], [], "data.files: 'negative' of triples.tsv has 7, which is not in collection.tsv."),
        (["1\t500\t499"], [], "data.files: 'query' of triples.tsv has 1, which is not in queries.tsv."),
        (["100\t500\t499", "99\t500"], [], "data.negatives_per_query is missing, .*: the first has 1, row 1 has 0."),
        (
            ["100\t500\t499", "99\t500\t1\t2"],
            [],
            "data.files: the first row of .* has 3 values, but the second has 4: 99, ",
        ),
        (["100\t500", "99\t500", "1\t2\t3"], [], "data.files cannot be loaded: .*Expected 2 fields in line 3, saw 3"),
        (["pid\tqid", "500\t100"], [], "data.columns must be given where the data has 'pid' before 'qid'"),
        (
            ["qid\tnegative_id\tpositive_id", "1\t2\t3"],
            [],
            "data.columns must be given where the data has 'negative_id'",
        ),
        (
            ["query-id\tcorpus-id\tscore", "100\t500\t0"],
            [],
            "data.files: no document is judged relevant, with a grade above",
        ),
        (
            ["query-id\tcorpus-id\tscore", "100\t500\tx"],
            [],
            "data.files: the grade of query 100 and document 500 must be ",
        ),
        (["query\tquery\tb"], [], "data.files: the first line of .*triples.tsv must name each of its columns once"),
        (["100"], [], "data.columns must be the query, its positive and any negatives"),
        ([], [], "data.files: there are no rows in .*triples.tsv."),
        (["100\t500\t499"], ["data.collection=null"], "data.collection is missing; data.queries needs it."),
        (["100\t500\t499"], ["data.queries=rows.txt"], "data.queries must end in .parquet, .jsonl, .*, got rows.txt."),
        (["100\t500\t499"], ["data.n_ways=4"], "data.n_ways does not apply to the contrastive loss"),
    ],
)
def test_triples_that_do_not_fit_are_one_sentence(lines, overrides, sentence, tmp_path):
    with pytest.raises(RecipeError, match=f"^{sentence}") as error:
        of_ids(tmp_path, "triples.tsv", lines, *overrides)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("line", ["[1, 2, [3]]", "[" * 10**6, "[1]", '{"qid": 1}', "[1, 2", "[1, null, 3]"])
def test_a_line_of_triples_that_is_none_is_named(line, tmp_path):
    with pytest.raises(
        RecipeError, match=r"^data.files: line 2 of .*triples.jsonl must be \[qid, pid, pid, ...\], as the"
    ):
        of_ids(tmp_path, "triples.jsonl", ["[100, 500, 499]", line])
