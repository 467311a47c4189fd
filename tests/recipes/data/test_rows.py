import json

import pytest
import yaml
from datasets import Dataset
from pylate.utils import ColBERTCollator

from pylate_fastmaxsim.recipes.config.schema import DataSection, MiningSection
from pylate_fastmaxsim.recipes.data.rows import load_columns, load_rows
from pylate_fastmaxsim.recipes.data.text import check_first
from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.load import load_recipe
from pylate_fastmaxsim.recipes.mining.pairs import load_pairs
from pylate_fastmaxsim.recipes.models.load import kind_of
from tests.support.case_tables import case_table
from tests.support.id_files import document, rows_of_ids, write_collection, write_lines
from tests.support.recipe_kinds import KINDS, tiny_of
from tests.support.tiny_recipe import json_lines, text, tiny, write

# Quotes and names of missing values are texts, and an id is no number.
ROWS = [{"query": f"00{n}", "positive": text(n, 6), "negative": ['"NA', "null", "a, b"][n % 3]} for n in range(12)]


def columns_of(*files: str, section: str = "data", **keys) -> Dataset:
    return load_columns(DataSection("files", files=list(files), **keys), section)


def rows_of(folder, rows: list[dict], *overrides: str, kind: str = "colbert", **sections) -> Dataset:
    recipe = load_recipe(write(folder, tiny_of(kind, folder, rows=rows, **sections)), overrides)
    return load_rows(recipe, kind_of(recipe.model))


@pytest.mark.parametrize(
    "name", ["a.parquet", "a.jsonl", "a.jsonl.gz", "a.json", "a.csv", "a.csv.gz", "a.tsv", "a.tsv.gz", "bare.tsv"]
)
def test_all_types_of_files_have_the_same_rows(name, tmp_path):
    file, rows = tmp_path / name, Dataset.from_list(ROWS)
    if file.suffix == ".parquet":
        rows.to_parquet(file)
    elif ".csv" in file.suffixes:
        rows.to_csv(tmp_path / "plain.csv")
        write_lines(file, (tmp_path / "plain.csv").read_text().splitlines())
    elif ".tsv" in file.suffixes:
        names = [list(ROWS[0])] * (name != "bare.tsv")
        write_lines(file, ["\t".join(line) for line in [*names, *(row.values() for row in ROWS)]])
    else:
        write_lines(file, [json.dumps(ROWS)] if file.suffix == ".json" else list(map(json.dumps, ROWS)))
    assert columns_of(str(file)).to_list() == ROWS


def test_a_line_of_names_is_known_by_what_it_begins_with_or_by_the_columns(tmp_path):
    corpus = write_lines(tmp_path / "corpus.tsv", ["text\tsource", *(f"{text(n, 5)}\t{n}" for n in range(3))])
    assert columns_of(corpus, columns=["text"])[:]["text"] == [text(n, 5) for n in range(3)]
    # A collection to mine in, as MS MARCO has it.
    collection = write_lines(tmp_path / "collection.tsv", [f"{n}\t{text(n, 5)}" for n in range(3)])
    assert columns_of(collection, section="mining.corpus").to_list() == [{"text": text(n, 5)} for n in range(3)]


def test_each_of_several_files_is_read_by_its_own_names(tmp_path):
    long = "p" * 200_000  # more than the csv module reads by default
    contents = {"a.csv": ["query,positive", f"q,{long}"], "b.csv": ["", "positive,query", "p,q"]}
    contents |= {"c.tsv": ["q\tp"], "d.tsv": ["query\tpositive", "q\tp"]}
    files = [write_lines(tmp_path / name, lines) for name, lines in contents.items()]
    assert columns_of(*files[:2]).to_list() == [{"query": "q", "positive": long}, {"query": "q", "positive": "p"}]
    with pytest.raises(RecipeError, match="^data.files: the first line must name the columns in all files or in none"):
        columns_of(*files[2:])
    # The index that pandas writes is no column.
    Dataset.from_list([{"query": "q", "positive": "p", "__index_level_0__": 3}]).to_parquet(tmp_path / "a.parquet")
    assert columns_of(str(tmp_path / "a.parquet"), collection="c.tsv").column_names == ["query", "positive"]


@pytest.mark.parametrize("name", ["triples.tsv", "triples.tsv.gz", "triples.jsonl", "named.tsv", "rows.jsonl"])
@pytest.mark.parametrize("others", [(), ("queries.parquet", "collection.jsonl.gz")])
def test_triples_of_ids_have_the_texts_of_a_collection(name, others, tmp_path):
    lines = ["qid\tpid\tnegative"] * (name == "named.tsv")
    for query, positive, negative in [(100 - n, 500 - n, 500 - 2 * n) for n in range(12)]:
        row = [query, positive, negative]
        if name == "rows.jsonl":
            row = {"qid": query, "positive_ids": [str(positive)], "negative_ids": [negative] * 3}
        lines.append(json.dumps(row) if ".jsonl" in name else "\t".join(map(str, row)))
    overrides = ["data.negatives_per_query=1"] if name == "rows.jsonl" else []
    rows = rows_of_ids(tmp_path, name, lines, *overrides, **write_collection(tmp_path, *others))
    expected = [{"query": f"query {n}", "positive": document(n), "negative": document(2 * n)} for n in range(12)]
    assert [rows[n] for n in range(12)] == expected


@pytest.mark.parametrize("name", ["train.tsv", "trec.tsv", "spaces.tsv.gz", "qrels.jsonl"])
def test_judgements_are_rows_of_a_query_and_a_relevant_document(name, tmp_path):
    judged = [(100 - n, 500 - n - step, step - 1) for n in range(6) for step in range(4)]
    names = ("query-id", "corpus-id", "score")
    if name == "qrels.jsonl":
        lines = [json.dumps(dict(zip(names, (str(q), str(d), grade), strict=True))) for q, d, grade in judged]
    elif name == "train.tsv":
        lines = ["\t".join(map(str, row)) for row in (names, *judged)]
    else:
        lines = [("\t" if name == "trec.tsv" else " ").join(map(str, (q, 0, d, grade))) for q, d, grade in judged]
    # The collection as BEIR has it; MS MARCO has documents of the ids 0 and 1, as TREC's other columns.
    files = write_collection(tmp_path, queries="queries.parquet", collection="corpus.jsonl")
    with open(files["collection"], "a") as collection:
        collection.writelines(json.dumps({"_id": str(n), "title": "", "text": "another"}) + "\n" for n in (0, 1, 2))
    expected = [{"query": f"query {n}", "positive": document(n + step)} for n in range(6) for step in (2, 3)]
    for overrides in ([], ["data.columns=[query-id, corpus-id]"]):
        rows = rows_of_ids(tmp_path, name, lines, *overrides, **files)
        assert [rows[n] for n in range(len(rows))] == expected


def test_the_text_of_a_collection_is_found_by_its_column(tmp_path):
    lines = [f"{100 - n}\t{500 - n}\t{499 - n}" for n in range(12)]
    files = write_collection(tmp_path)
    for column, overrides in {"contents": [], "abstract": ["data.text_key=abstract"]}.items():
        rows = [{"id": str(500 - n), column: f"text {n}", "title": f"title {n}", "url": "u"} for n in range(13)]
        files["collection"] = json_lines(tmp_path / f"{column}.jsonl", rows)
        loaded = rows_of_ids(tmp_path, "triples.tsv", lines, *overrides, **files)
        assert loaded[3] == {"query": "query 3", "positive": "title 3 text 3", "negative": "title 4 text 4"}
    sentence = "^data.collection: .* one of texts .text, body, .* it has id, abstract, title, "
    with pytest.raises(RecipeError, match=sentence):
        rows_of_ids(tmp_path, "triples.tsv", lines, **files)


def test_lines_of_json_with_several_negatives_scores_or_texts(tmp_path):
    lines = [json.dumps([f"what is {n}", 500 - n, 499 - n, "498"]) for n in range(12)]
    rows = rows_of_ids(tmp_path, "triples.jsonl", lines, queries=None)
    negatives = {"negative_1": document(4), "negative_2": document(2)}
    assert rows[3] == {"query": "what is 3", "positive": document(3), **negatives}
    one = rows_of_ids(tmp_path, "triples.jsonl", lines, "data.negatives_per_query=1", queries=None)
    assert one.column_names == ["query", "positive", "negative"]
    texts = [json.dumps(list(row.values())) for row in ROWS]
    rows = rows_of_ids(tmp_path, "texts.jsonl", texts, queries=None, collection=None)
    assert rows.column_names == ["query", "positive", "negative"] and rows[5] == ROWS[5]

    lines = [json.dumps([100 - n, *([500 - n - k, 1.5 - k] for k in range(3 + n % 2))]) for n in range(12)]
    rows = rows_of_ids(tmp_path, "examples.json", lines, loss="distillation")
    assert rows[1] == {"query": "query 1", "documents": list(map(document, (1, 2, 3))), "scores": [1.5, 0.5, -0.5]}
    two = rows_of_ids(tmp_path, "examples.json", lines, "data.n_ways=2", loss="distillation")
    assert len(two[0]["scores"]) == 2


def test_each_positive_is_a_row_and_negatives_are_drawn_or_repeated(tmp_path):
    rows = [{"query": "q0", "pos": ["p0"], "neg": ["a"]}]
    rows.append({"query": "q1", "pos": ["p1", "p2"], "neg": ["b", None, "c", "d", "e", "f"]})
    loaded = rows_of(tmp_path, rows, "data.negatives_per_query=3")
    assert loaded.column_names == ["query", "positive", "negative_1", "negative_2", "negative_3"]
    first, second, third = (list(row.values()) for row in loaded)
    assert first == ["q0", "p0", "a", "a", "a"]
    assert (second[:2], third[:2]) == (["q1", "p1"], ["q1", "p2"])
    for drawn in (second[2:], third[2:]):
        assert second[2:] != third[2:] and len(set(drawn)) == 3 and set(drawn) <= set("bcdef")
    # By the seed, whatever else is in the data.
    seeds = [rows_of(tmp_path, rows[1:], "data.negatives_per_query=3", f"data.seed={n}") for n in range(4)]
    assert [list(row.values()) for row in rows_of(tmp_path, rows[1:], "data.negatives_per_query=3")] == [second, third]
    assert len({tuple(each[0].values()) for each in seeds}) > 1
    # Columns with gaps are those of a row that has fewer.
    rows = [{"query": "q", "positive": "p", "negative_1": "a", "negative_2": two} for two in ("b", None)]
    loaded = rows_of(tmp_path, rows, "data.negatives_per_query=2")
    assert [list(row.values())[2:] for row in loaded] == [["a", "b"], ["a", "a"]]


@case_table("""
row | columns
{query: q, positive: [p], negatives: [a, b]} | query positive negative_1 negative_2
{query: q, positive: p, negatives: [a]} | query positive negative
{query: q, positive: [p]} | query positive
{query: q, positive: p, hard_1: a, hard_2: b} | query positive hard_1 hard_2
{positive: q, similar: [p], other: [a]} | query positive negative
""")
def test_rows_with_as_many_negatives_each_need_no_number_of_them(row, columns, tmp_path):
    row, columns = yaml.safe_load(row), columns.split()
    loaded = rows_of(tmp_path, [row] * 2, f"data.columns=[{', '.join(row)}]")
    assert loaded.column_names == columns
    assert all(list(each.values()) == ["q", "p", "a", "b"][: len(columns)] for each in loaded)


def read_by(how: str, folder, row: dict, **data) -> list[str]:
    """The values of a row, without the query, as a table, as a stream, or the positives of pairs to mine with."""
    if how == "pairs":
        file = json_lines(folder / "pairs.jsonl", [{name: value for name, value in row.items() if name != "neg"}])
        pairs = load_pairs(MiningSection(pairs=DataSection("files", files=[file], **data), teacher="t"))
        return pairs.documents["text"][:]
    values = tiny(folder, rows=[row], data={"streaming": how == "stream", **data})
    values["training"]["per_device_train_batch_size"] = 1
    recipe = load_recipe(write(folder, values | {"evaluation": {"rows": 0}, "model": {"name_or_path": "none"}}))
    return list(next(iter(load_rows(recipe, kind_of(recipe.model)))).values())[1:]


@pytest.mark.parametrize("how", ["table", "stream", "pairs"])
@pytest.mark.parametrize("key", ["text", "body", "content", "contents", "passage", "passage_text", "abstract"])
def test_the_text_of_a_passage_is_found_by_its_key(key, how, tmp_path):
    row = {"query": "why do bees dance", "pos": {"title": "Bees", key: "Bees dance.", "docid": "7"}}
    row["neg"] = [{"title": "Bread", key: "It rises."}, {"title": None, key: "It sours.", "url": "u"}]
    own = {"text_key": key} if key == "abstract" else {}
    found = read_by(how, tmp_path, row, **own)
    assert found == ["Bees Bees dance.", "Bread It rises.", "It sours."][: 1 if how == "pairs" else 3]
    if own:
        section = "mining.pairs" if how == "pairs" else "data"
        sentence = f"^{section}.text_key must name the key .*: '(pos|neg)' of row 0 has the keys title, abstract, "
        with pytest.raises(RecipeError, match=sentence):
            read_by(how, tmp_path, row)


@pytest.mark.parametrize("how", ["table", "stream"])
def test_negatives_are_texts_and_passages_of_one_system_or_of_several(how, tmp_path):
    negatives = ["a", {"title": "B", "text": "b"}, {"text": "c", "body": "x"}, {"title": "D", "text": ""}, {"text": ""}]
    assert read_by(how, tmp_path, {"query": "q", "pos": "p", "neg": negatives}) == ["p", "a", "B b", "c", "D"]
    row = {"query": "q", "pos": ["p"], "neg": {"bm25": ["a", "b"], "dense": ["b", {"title": "C", "body": "c"}]}}
    assert read_by(how, tmp_path, row) == ["p", "a", "b", "C c"]
    assert read_by(how, tmp_path, row, negatives=["dense"]) == ["p", "b", "C c"]
    both = read_by(how, tmp_path, row, negatives=["dense", "bm25"], negatives_per_query=4)
    assert both == ["p", "b", "C c", "a", "b"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_order_of_columns_counts_where_none_is_named_query(kind, tmp_path):
    rows = [{"question": text(row, 4), "answer": [text(row, 9)], "wrong": [text(row + 1, 8)] * 3} for row in range(12)]
    overrides = ["data.negatives_per_query=2", "data.columns=[question, answer, wrong]"]
    query, *others = rows_of(tmp_path, rows, *overrides, kind=kind).column_names
    assert query == ("question" if kind == "splade" else "query") and others == ["positive", "negative_1", "negative_2"]
    swapped = [{"answer": "a", "question": "q"}] * 2
    assert rows_of(tmp_path, swapped, "data.columns=[question, answer]", kind=kind)[0]["answer"] == "a"


NAMES = """
anchor positive negative, question answer negative_1 negative_2 negative_10, query pos neg, sent0 sent1 hard_neg,
query document negatives, query positive_passages negative_passages, anchor positive, title text,
query_id query positive_id positive bm25_negatives hardNeg2
"""


@pytest.mark.parametrize("columns", NAMES.split(","))
def test_names_that_data_sets_have_for_negatives_need_no_columns(columns, tmp_path):
    recipe = load_recipe(write(tmp_path, tiny(tmp_path, rows=[{name: text(3, 5) for name in columns.split()}])))
    check_first(recipe, dict.fromkeys(load_columns(recipe.data, "data").column_names, "a"))


def test_columns_may_be_named_in_any_order(tmp_path):
    rows = [{"query": "q", "negative": "n", "positive": "p"}] * 2
    for columns in (["query", "positive", "negative"], ["query", "negative", "positive"], ["query", "negative"]):
        assert rows_of(tmp_path, rows, f"data.columns=[{', '.join(columns)}]").column_names == columns


def test_ids_are_what_the_collator_takes_for_ids(tmp_path):
    names = ["query", "query_id", "_id", "doc_ids", "main_idea", "id", "idea", "ID_", "dataset_name", "dataset", "name"]
    kept = columns_of(json_lines(tmp_path / "rows.jsonl", [dict.fromkeys(names, "a")])).column_names
    collate = ColBERTCollator(lambda texts, **options: {"input_ids": texts})
    collated = [name for name in collate([dict.fromkeys(names, "a")]) if name.endswith("_input_ids")]
    assert [f"{name}_input_ids" for name in kept] == collated
    assert kept == ["query", "id", "idea", "ID_", "dataset", "name"]
