"""Evaluation in BEIR's layout: the ranking and the metrics of stock PyLate, from files and from the Hub's layouts."""

from __future__ import annotations

from pathlib import Path

import pytest
from pylate import evaluation
from pylate.scores import colbert_scores

from pylate_fastmaxsim import TokenBatch, compress, maxsim
from pylate_fastmaxsim.cli.tables import training_table
from pylate_fastmaxsim.recipes.data import collection as beir
from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.evaluation import ranking
from pylate_fastmaxsim.recipes.load import load_recipe
from pylate_fastmaxsim.recipes.models.retriever import retriever_of
from pylate_fastmaxsim.recipes.training.inputs import load_data
from pylate_fastmaxsim.recipes.training.train import train
from tests.support import models
from tests.support.beir_folder import QUERIES, judged, tables, write_folder
from tests.support.tiny_recipe import hub_dataset, text, tiny, write


def write_hub(folder: Path, layout: str) -> Path:
    content = tables()
    qrels = content.pop("qrels")
    if layout == "BeIR":
        hub_dataset(folder, **content)
        hub_dataset(folder.with_name(f"{folder.name}-qrels"), default=qrels)
    else:
        hub_dataset(folder, **content, **{"default" if layout == "mteb" else "qrels": qrels})
    return folder


@pytest.mark.parametrize("layout", ["qrels/test.tsv", "qrels.tsv", "BeIR", "mteb", "qrels"])
def test_every_layout_gives_the_same_collection(layout, tmp_path):
    write_layout = write_folder if layout.endswith("tsv") else write_hub
    folder = write_layout(tmp_path / "data", layout)
    split = "test" if layout.endswith("tsv") else "train"
    collection = beir.load_collection(str(folder), split)
    expected = tables()
    assert collection.corpus["_id"][:] == [row["_id"] for row in expected["corpus"]]
    assert collection.queries == {row["_id"]: row["text"] for row in expected["queries"][:QUERIES]}
    assert collection.judgements["q1"] == {
        row["corpus-id"]: row["score"] for row in expected["qrels"] if row["query-id"] == "q1"
    }


@pytest.mark.e2e  # ranx compiles for seconds
def test_ranking_and_metrics_are_those_of_stock_pylate(encoder, tmp_path, monkeypatch):
    model = models.load_model(encoder("bert"), do_query_expansion=True)
    collection = beir.load_collection(str(write_folder(tmp_path / "data")))
    monkeypatch.setattr(ranking, "BATCHES_AT_ONCE", 3)  # several batches of documents
    documents = [f"{row['title']} {row['text']}".strip() for row in tables()["corpus"]]
    d_embeddings = model.encode(documents, is_query=False, convert_to_tensor=True)
    ranked = []
    for query in model.encode(list(collection.queries.values()), is_query=True, convert_to_tensor=True):
        # One document at a time: stock lets the zeros that it pads with win over negative similarities.
        scores = {
            row["_id"]: colbert_scores(query[None], document[None]).item()
            for row, document in zip(tables()["corpus"], d_embeddings, strict=True)
        }
        best = sorted(scores, key=scores.get, reverse=True)[: ranking.DEPTH]
        ranked.append([{"id": name, "score": scores[name]} for name in best])
    found, _ = ranking.retrieve(retriever_of(model), collection, batch_size=8)
    for matches, got in zip(ranked, found.values(), strict=True):
        assert list(got.values()) == pytest.approx([match["score"] for match in matches], rel=1e-5)
        assert len(set(got) & {match["id"] for match in matches}) >= ranking.DEPTH - 2  # rounding at the last ranks
    expected = evaluation.evaluate(ranked, collection.judgements, list(collection.queries), list(ranking.METRICS))
    metrics = ranking.evaluate_collection(retriever_of(model), collection, batch_size=8)
    assert metrics == pytest.approx(expected, abs=1e-6)
    assert 0 < metrics["ndcg@10"] < 1 and 0 < metrics["recall@100"] < 1


@pytest.mark.parametrize("name", ["int8", "residual-2"])
def test_compressed_documents_are_ranked_by_their_own_scores(name, encoder, tmp_path, monkeypatch):
    model = models.load_model(encoder("bert"))
    collection = beir.load_collection(str(write_folder(tmp_path / "data")))
    monkeypatch.setattr(ranking, "BATCHES_AT_ONCE", 3)
    trained, train_codec = [], ranking.train_codec
    monkeypatch.setattr(ranking, "train_codec", lambda *args: trained.append(train_codec(*args)) or trained[-1])
    documents = [f"{row['title']} {row['text']}".strip() for row in tables()["corpus"]]
    q, d = (
        TokenBatch.from_list(model.encode(texts, is_query=is_query, convert_to_tensor=True))
        for texts, is_query in ((list(collection.queries.values()), True), (documents, False))
    )
    found, _ = ranking.retrieve(retriever_of(model), collection, batch_size=8, corpus_format=name)
    expected = maxsim(q, compress(d, trained[0] if trained else name)).sort(dim=1, descending=True, stable=True).values
    for row, got in zip(expected, found.values(), strict=True):
        assert list(got.values()) == pytest.approx(row[: ranking.DEPTH].tolist(), rel=1e-5)
    plain, _ = ranking.retrieve(retriever_of(model), collection, batch_size=8)
    assert list(plain["q0"].values()) != pytest.approx(list(found["q0"].values()), rel=1e-5)


def ranked_with(folder: Path, encoder, **changed: list[dict]) -> dict[str, dict[str, float]]:
    model = models.load_model(encoder("bert"))
    collection = beir.load_collection(str(write_folder(folder, **changed)))
    return ranking.retrieve(retriever_of(model), collection, batch_size=8)[0]


@pytest.mark.parametrize(
    "own",
    [
        {"title": "", "text": text(3, 5)},
        {"title": "a topic", "text": f" {text(3, 5)}\n"},  # as in ArguAna
        {"title": text(3, 5), "text": "an abstract"},  # as in SciDocs
    ],
)
def test_the_query_itself_is_no_result(own, encoder, tmp_path):
    content = tables()
    # With the query itself one more than are looked at, so that it would be among them or take a rank from another.
    corpus = content["corpus"][: ranking.DEPTH]
    plain = ranked_with(tmp_path / "plain", encoder, corpus=corpus)
    corpus = [{"_id": "q1", **own}, *corpus]
    assert content["queries"][1] == {"_id": "q1", "text": text(3, 5)}
    found = ranked_with(tmp_path / "own", encoder, corpus=corpus)
    assert len(found["q1"]) == len(plain["q1"]) == ranking.DEPTH
    assert found["q1"] == pytest.approx(plain["q1"], rel=1e-5)


def test_the_query_itself_is_a_result_of_other_queries_and_where_it_is_judged_relevant(encoder, tmp_path):
    content = tables()
    all_of_it = [{"_id": "q1", "title": "", "text": text(3, 5)}, *content["corpus"][:60]]
    qrels = [row for row in content["qrels"] if row["corpus-id"] < "0060"]
    assert "q1" in ranked_with(tmp_path / "others", encoder, corpus=all_of_it, qrels=qrels)["q2"]
    for grade in (0, 1):
        judged = [*qrels, {"query-id": "q1", "corpus-id": "q1", "score": grade}]
        found = ranked_with(tmp_path / f"grade-{grade}", encoder, corpus=all_of_it, qrels=judged)
        assert ("q1" in found["q1"]) == bool(grade)
    # Where queries and documents are numbered independently of each other, as in Cranfield.
    corpus = [row | {"_id": f"q{number}"} for number, row in enumerate(content["corpus"][:90])]
    qrels = [{"query-id": f"q{row}", "corpus-id": f"q{row + 7}", "score": 1} for row in range(QUERIES)]
    found = ranked_with(tmp_path / "numbered", encoder, corpus=corpus, qrels=qrels)
    assert all(len(results) == 90 for results in found.values())


@pytest.mark.e2e
def test_a_recipe_reports_it(tmp_path, caplog, monkeypatch):
    folder = write_folder(tmp_path / "data", qrels=[*tables()["qrels"], *judged(("q1", "gone", 1))])
    recipe = tiny(tmp_path, evaluation={"rows": 0, "beir": str(folder)})
    recipe["model"]["build"]["dropout"] = 0.0
    recipe["training"] |= {"max_steps": 2, "save_steps": None}
    loaded = load_recipe(write(tmp_path, recipe))
    assert len(load_data(loaded).train) == 60
    stock = train(loaded)
    assert len([message for message in caplog.messages if "judged documents are not in the corpus" in message]) == 1
    assert {"nDCG@10", "MRR@10", "Recall@100"} <= dict(training_table(stock).rows).keys()
    fast = train(load_recipe(tmp_path / "tiny.yaml", ["fast.enabled=true", "fast.stock_masking=true"]), resume=False)
    assert {name: fast[name] for name in ranking.METRICS} == pytest.approx(
        {name: stock[name] for name in ranking.METRICS}
    )
    train_codec = ranking.train_codec
    monkeypatch.setattr(ranking, "train_codec", lambda *args: trained.append(args[:2]) or train_codec(*args))
    trained = []
    compressed = train(load_recipe(tmp_path / "tiny.yaml", ["evaluation.corpus_format=residual-1"]), resume=False)
    assert trained == [("evaluation.corpus_format residual-1", "residual-1")] and compressed["ndcg@10"] > 0


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"qrels": [{"query": "q1", "corpus-id": "1", "score": 1}]},
            "must name the columns query-id, corpus-id, score",
        ),
        ({"qrels": judged(("q99", "0001", 1))}, "does not fit together: no query is judged."),
        (
            {"qrels": tables()["qrels"] + judged(("q99", "0001", 1))},
            "does not fit together: the query q99 is judged but is not among the queries.",
        ),
        ({"qrels": judged(("q1", "0001", 0.5))}, "of query q1 and document 0001 must be an integer, got '0.5'"),
        ({"qrels": judged(("q1", "0001", 10**22))}, "of query q1 and document 0001 must be an integer, got '1000"),
        ({"qrels": judged(("q1", "0001", 1), ("q1", "0001", 0))}, "must have one grade, but are judged 1 and 0."),
        ({"corpus": [{"_id": "d1", "text": "a"}]}, "no judged document is in the corpus, whose first id is 'd1'"),
        ({"corpus": [row | {"text": 7} for row in tables()["corpus"]]}, "'text' of the subset corpus must hold text"),
        (
            {"corpus": [*tables()["corpus"], {"_id": "0007", "title": "", "text": "another passage"}]},
            "'_id' of the subset corpus must be another in each row, but 0007 is that of several.",
        ),
        (
            {"queries": [*tables()["queries"], {"_id": None, "text": "a"}]},
            "must hold an id in every row, but row 8 has",
        ),
        (
            {"queries": [*tables()["queries"], {"_id": 7, "text": "a"}]},
            "'_id' of the subset queries must be text in all rows or a number in all rows.",
        ),
        ({"corpus": [{"id": "1", "text": "a"}]}, "the subset corpus has no column '_id', it has id, text."),
    ],
)
def test_a_collection_that_does_not_fit_gets_one_sentence(changes, sentence, tmp_path):
    folder = write_folder(tmp_path / "data", **changes)
    with pytest.raises(RecipeError) as error:
        beir.load_collection(str(folder))
    assert str(error.value).startswith("evaluation.beir: ") and sentence in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("separator", [" ", "\t", "   "])
def test_judgements_of_trec_are_those_of_beir_and_grades_below_0_are_not_relevant(separator, tmp_path):
    qrels = [row | {"score": row["score"] - 1} for row in tables()["qrels"]]
    folder = write_folder(tmp_path / "data", qrels=qrels)
    (tmp_path / "qrels.txt").write_text(
        "".join(separator.join((row["query-id"], "0", row["corpus-id"], f"{row['score']}\r\n")) for row in qrels)
    )
    expected = beir.load_collection(str(folder))
    files = folder / "corpus.jsonl", folder / "queries.jsonl", tmp_path / "qrels.txt"
    assert beir.load_files_of_collection(*files).judgements == expected.judgements
    assert {grade for own in expected.judgements.values() for grade in own.values()} == {0, 1}
    with open(tmp_path / "qrels.txt", "a") as lines:
        lines.write("q1 0001 1\n")
    with pytest.raises(RecipeError, match="^--qrels: a line of .* must be qid 0 docid grade, got 'q1 0001 1'."):
        beir.load_files_of_collection(*files)


def test_grades_may_be_floats_that_are_whole(tmp_path):
    qrels = judged(("q1", "0001", 1.0), ("q2", "0002", 2.0), ("q1", "0001", 1.0))
    files, hub = write_folder(tmp_path / "files", qrels=qrels), tmp_path / "hub"
    hub_dataset(hub, **(tables() | {"qrels": qrels}))
    for folder, split in ((files, "test"), (hub, "train")):
        grades = beir.load_collection(str(folder), split).judgements
        assert grades == {"q1": {"0001": 1}, "q2": {"0002": 2}}


def test_judged_documents_that_the_corpus_lacks_are_counted_once(tmp_path, caplog):
    qrels = judged(("q1", "0001", 1), ("q1", "gone", 1), ("q2", "gone", 0), ("q2", "lost", 1))
    folder = write_folder(tmp_path / "data", qrels=qrels)
    for _ in range(2):  # as a process does that builds the model as well
        collection = beir.load_collection(str(folder))
    assert collection.judgements["q2"] == {"gone": 0, "lost": 1}
    (said,) = caplog.messages
    assert said.startswith(f"evaluation.beir: 2 of 3 judged documents are not in the corpus of {folder}")


def test_what_is_missing_is_named(tmp_path):
    folder = write_folder(tmp_path / "data")
    with pytest.raises(RecipeError, match="the folder .* must hold qrels/dev.tsv or qrels.tsv"):
        beir.load_collection(str(folder), "dev")
    (folder / "queries.jsonl").unlink()
    with pytest.raises(RecipeError, match="the folder .* must hold queries.jsonl or queries.parquet"):
        beir.load_collection(str(folder))


def test_documents_may_lack_a_title_or_a_text(encoder, tmp_path):
    qrels, corpus = judged(("q1", "0001", 1)), tables()["corpus"][:9]
    corpus[3]["title"] = corpus[4]["text"] = None
    assert len(ranked_with(tmp_path / "null", encoder, corpus=corpus, qrels=qrels)["q1"]) == 9
    for row in corpus:
        del row["title"]
    assert len(ranked_with(tmp_path / "none", encoder, corpus=corpus, qrels=qrels)["q1"]) == 9
