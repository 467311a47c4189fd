import pytest
import yaml

from pylate_fastmaxsim.recipes.data import collection as beir
from pylate_fastmaxsim.recipes.errors import RecipeError
from tests.support.beir_folder import QUERIES, judged, tables, write_folder
from tests.support.case_tables import case_table
from tests.support.tiny_recipe import hub_dataset


def write_hub(folder, layout: str):
    content = tables()
    qrels = content.pop("qrels")
    if layout == "BeIR":
        hub_dataset(folder.with_name(f"{folder.name}-qrels"), default=qrels)
        return hub_dataset(folder, **content)
    return hub_dataset(folder, **content, **{"default" if layout == "mteb" else "qrels": qrels})


@pytest.mark.parametrize("layout", ["qrels/test.tsv", "qrels.tsv", "BeIR", "mteb", "qrels"])
def test_every_layout_gives_the_same_collection(layout, tmp_path):
    write_layout = write_folder if layout.endswith("tsv") else write_hub
    folder = write_layout(tmp_path / "data", layout)
    collection = beir.load_collection(str(folder), "test" if layout.endswith("tsv") else "train")
    expected = tables()
    assert collection.corpus["_id"][:] == [row["_id"] for row in expected["corpus"]]
    assert collection.queries == {row["_id"]: row["text"] for row in expected["queries"][:QUERIES]}
    grades = {row["corpus-id"]: row["score"] for row in expected["qrels"] if row["query-id"] == "q1"}
    assert collection.judgements["q1"] == grades


# Rows of a table that are added, or with "only" are all of it.
@case_table("""
table | row | sentence
qrels | only {query: q1, corpus-id: '1', score: 1} | must name the columns query-id, corpus-id, score
qrels | only {query-id: q99, corpus-id: '0001', score: 1} | does not fit together: no query is judged.
qrels | {query-id: q99, corpus-id: '0001', score: 1}
    | does not fit together: the query q99 is judged but is not among the queries.
qrels | only {query-id: q1, corpus-id: '0001', score: 0.5}
    | of query q1 and document 0001 must be an integer, got '0.5'
qrels | only {query-id: q1, corpus-id: '0001', score: 10000000000000000000000}
    | of query q1 and document 0001 must be an integer, got '1000
qrels | {query-id: q0, corpus-id: '0017', score: 0} | must have one grade, but are judged 1 and 0.
corpus | only {_id: d1, text: a} | no judged document is in the corpus, whose first id is 'd1'
corpus | only {_id: d1, text: 7} | 'text' of the subset corpus must hold text
corpus | {_id: '0007', title: '', text: another passage}
    | '_id' of the subset corpus must be another in each row, but 0007 is that of several.
corpus | only {id: '1', text: a} | the subset corpus has no column '_id', it has id, text.
corpus | {_id: '0200', title: '', text: "caf\\udce9"} | 'text' of the subset corpus must hold text in UTF-8, but some
queries | {_id: null, text: a} | must hold an id in every row, but row 8 has
queries | {_id: 7, text: a} | '_id' of the subset queries must be text in all rows or a number in all rows.
""")
def test_a_collection_that_does_not_fit_gets_one_sentence(table, row, sentence, tmp_path):
    before = [] if row.startswith("only") else tables()[table]
    folder = write_folder(tmp_path / "data", **{table: [*before, yaml.safe_load(row.removeprefix("only"))]})
    with pytest.raises(RecipeError) as error:
        beir.load_collection(str(folder))
    assert str(error.value).startswith("evaluation.beir: ") and sentence in str(error.value)
    assert "\n" not in str(error.value)


def test_what_is_missing_is_named(tmp_path):
    folder = write_folder(tmp_path / "data")
    for split, said in (("dev", "qrels/dev.tsv or qrels.tsv"), ("test", "queries.jsonl or queries.parquet")):
        with pytest.raises(RecipeError, match=f"the folder .* must hold {said}"):
            beir.load_collection(str(folder), split)
        (folder / "queries.jsonl").unlink(missing_ok=True)


@pytest.mark.parametrize("separator", [" ", "\t", "   "])
def test_judgements_of_trec_are_those_of_beir_and_grades_below_0_are_not_relevant(separator, tmp_path):
    qrels = [row | {"score": row["score"] - 1} for row in tables()["qrels"]]
    folder = write_folder(tmp_path / "data", qrels=qrels)
    lines = [separator.join((row["query-id"], "0", row["corpus-id"], f"{row['score']}\r\n")) for row in qrels]
    (tmp_path / "qrels.txt").write_text("".join(lines))
    expected = beir.load_collection(str(folder))
    files = folder / "corpus.jsonl", folder / "queries.jsonl", tmp_path / "qrels.txt"
    assert beir.load_files_of_collection(*files).judgements == expected.judgements
    assert {grade for own in expected.judgements.values() for grade in own.values()} == {0, 1}
    with open(tmp_path / "qrels.txt", "a") as more:
        more.write("q1 0001 1\n")
    with pytest.raises(RecipeError, match="^--qrels: a line of .* must be qid 0 docid grade, got 'q1 0001 1'."):
        beir.load_files_of_collection(*files)


def test_grades_may_be_floats_that_are_whole(tmp_path):
    qrels = judged(("q1", "0001", 1.0), ("q2", "0002", 2.0), ("q1", "0001", 1.0))
    files, hub = write_folder(tmp_path / "files", qrels=qrels), tmp_path / "hub"
    hub_dataset(hub, **(tables() | {"qrels": qrels}))
    for folder, split in ((files, "test"), (hub, "train")):
        assert beir.load_collection(str(folder), split).judgements == {"q1": {"0001": 1}, "q2": {"0002": 2}}


def test_judged_documents_that_the_corpus_lacks_are_counted_once(tmp_path, caplog):
    qrels = judged(("q1", "0001", 1), ("q1", "gone", 1), ("q2", "gone", 0), ("q2", "lost", 1))
    folder = write_folder(tmp_path / "data", qrels=qrels)
    for _ in range(2):  # as a process does that builds the model as well
        collection = beir.load_collection(str(folder))
    assert collection.judgements["q2"] == {"gone": 0, "lost": 1}
    (said,) = caplog.messages
    assert said.startswith(f"evaluation.beir: 2 of 3 judged documents are not in the corpus of {folder}")
