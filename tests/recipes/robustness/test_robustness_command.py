import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from datasets import Dataset

from pylate_fastmaxsim import Max, Softmax
from pylate_fastmaxsim.diagnostics.injection import ATTACKS, RANDOM, TARGETED
from pylate_fastmaxsim.recipes.data.collection import Collection
from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.models.retriever import retriever_of
from pylate_fastmaxsim.recipes.robustness.lengthen import Lengthened
from pylate_fastmaxsim.recipes.robustness.measure import measure
from pylate_fastmaxsim.recipes.robustness.task import Settings, Task, collection_task
from pylate_fastmaxsim.recipes.search.significance import student
from tests.support import models
from tests.support.beir_folder import write_folder
from tests.support.command_line import fastmaxsim
from tests.support.recipe_runs import command
from tests.support.tiny_recipe import text, tiny, write

FEW = ["--pooling", "max", "--pooling", "softmax=0.1", "--times", "1,3", "--tokens", "0,20"]


@pytest.fixture
def task() -> Task:
    documents = [text(row, 4 + row) for row in range(6)]
    grades = torch.zeros(2, 6)
    grades[0, 1] = grades[1, 4] = 1
    own = [0, None, 1, None, None, None]
    return Task(
        "tiny", {"a": text(7, 3), "b": text(8, 3)}, documents, grades, [documents[0], documents[2], "a b c"], own
    )


def test_a_collection_keeps_gold_documents_and_leaves_the_query_itself_out():
    corpus = Dataset.from_list([{"_id": f"d{row}", "title": "", "text": text(row, 3 + row)} for row in range(12)])
    queries = {"q": text(1, 4), "d3": text(3, 6), "none": "not relevant"}
    judged = {"q": {"d1": 2, "d5": 1, "d9": 0}, "d3": {"d7": 1, "gone": 1}, "none": {"d2": 0}}
    collection = Collection(corpus, queries, judged)
    found = collection_task("tiny", collection, Settings())
    assert found.queries == {"q": text(1, 4), "d3": text(3, 6)} and len(found.documents) == 12
    assert found.grades[0].tolist() == [0, 2, 0, 0, 0, 1, *[0] * 6]
    assert found.grades[1, 3].isnan() and found.grades[1, 7] == 1 and found.grades.nan_to_num().sum() == 4
    free = [0, 2, 3, 4, 6, 8, 9, 10, 11]
    assert found.fillers == [found.documents[document] for document in free]
    assert [document for document, own in enumerate(found.own) if own is not None] == free
    few = collection_task("tiny", collection, Settings(max_queries=1, max_documents=4, seed=1))
    assert few.grades.shape[0] == 1 and len(few.documents) == 4
    assert (few.grades > 0).sum() in (1, 2)
    # Gold documents alone are as many as are measured; each filler is the document that it is said to be.
    gold = collection_task("tiny", collection, Settings(max_documents=2))
    assert len(gold.documents) == 3 and len(gold.fillers) == 2 and gold.own == [None] * 3
    for document, own in zip(few.documents, few.own, strict=True):
        assert own is None or few.fillers[own] == document


def test_text_is_appended_behind_what_the_model_reads_and_read_as_a_whole(encoder, task):
    model = models.load_model(encoder("modernbert"), document_length=8)
    retriever = retriever_of(model)
    documents = retriever.encode(task.documents, 4, is_query=False)
    longer = Lengthened(retriever, task, documents, [1, 3], "auto", 4, seed=0)
    (_, same), (times, batch) = longer
    assert same is documents and times == 3 and longer.append == "text"
    assert longer.limit > 100 and longer.cut == {3: 0} and model.document_length == 8
    # What a document says beyond its limit is not what makes it longer.
    assert batch.lengths.max() <= 3 * 8 + 16
    assert (batch.lengths > documents.lengths).all()
    # The prefix, the first token and the document's own first words are at their places.
    begun = [each.values[each.starts] for each in (batch, documents)]
    assert (torch.nn.functional.cosine_similarity(*begun) > 0.5).all()


def test_tokens_are_appended_where_the_positions_end(encoder, task):
    retriever = retriever_of(models.load_model(encoder("bert"), document_length=20))  # of 64 positions
    documents = retriever.encode(task.documents, 4, is_query=False)
    longer = Lengthened(retriever, task, documents, [1, 8], "auto", 4, seed=0)
    assert (longer.append, longer.limit) == ("tokens", None)
    (_, same), (_, batch) = longer
    assert batch.lengths.tolist() == (8 * documents.lengths).tolist()
    assert torch.equal(batch.values[: same.lengths[0]], same.values[: same.lengths[0]])
    other = replace(task, fillers=["a b c " * 2000], own=[None] * 6)
    cut = Lengthened(retriever, other, documents, [60], "text", 4, seed=0)
    list(cut)
    assert cut.limit == 64 and 0 < cut.cut[60] <= 6


def test_what_cannot_be_measured_is_refused_in_one_sentence(encoder, task):
    model = models.load_model(encoder("modernbert"), document_length=8)
    retriever = retriever_of(model, finite=True)
    for fillers in ([], [task.documents[0], " "]):  # the second case would append a document to itself
        with pytest.raises(RecipeError, match="tiny has no other document that is relevant for no query"):
            measure(retriever, replace(task, fillers=fillers), Settings(), 4)
    result, pairs = measure(retriever, replace(task, fillers=[]), Settings((Max(),), times=[1], tokens=[0]), 4)
    assert len(result["lengths"]) == 1 and pairs[0].injected[TARGETED].shape[1] == 0
    with torch.no_grad():
        model[-1].linear.weight.fill_(torch.nan)
    with pytest.raises(RecipeError, match="some are NaN or infinite"):
        measure(retriever, task, Settings(), 4)


def test_pairs_are_those_of_the_sweep_with_the_names_of_their_tokens(encoder, task):
    retriever = retriever_of(models.load_model(encoder("modernbert"), document_length=16))
    _, pairs = measure(retriever, task, Settings((Max(), Softmax(0.1)), [1], [0, 5, 9]), 4)
    for pair in pairs:
        assert len(pair.query_tokens) == len(pair.similarities)
        assert pair.query_tokens[2].strip() in pair.query
        assert pair.document != task.documents[{task.queries["a"]: 1, task.queries["b"]: 4}[pair.query]]
        assert (
            pair.injected[TARGETED].shape[1] == 5
            and pair.injected[TARGETED].amax() > 0.8 > pair.injected[RANDOM].amax()
        )


@pytest.mark.e2e
def test_a_trained_recipe_is_measured_and_reported(tmp_path):
    file = write(tmp_path, tiny(tmp_path, training={"max_steps": 2, "save_steps": None}))
    command("train", file, code=0)
    folder = tmp_path / "out"
    done = fastmaxsim(["robustness", str(file), *FEW], code=0)
    result = json.loads((folder / "robustness.json").read_text())
    assert result["poolings"] == ["max", "softmax=0.1"] and result["recipe"] == "tiny"
    assert result["appended"] == "text" and result["lengthened_document_length"] > result["document_length"] == 24
    rows = [(times, pooling) for times in (1, 3) for pooling in result["poolings"]]
    assert [(row["times"], row["pooling"]) for row in result["lengths"]] == rows
    assert result["lengths"][2]["tokens"] > 2 * result["lengths"][0]["tokens"]
    assert {row["attack"] for row in result["injection"]} == {*ATTACKS}
    assert all(0 <= row[name] <= 1 for row in result["injection"] for name in ("ndcg@10", "recall@1", "hijack_rate"))
    # Without an attack, what the evaluation of the recipe measures.
    evaluated = json.loads((folder / "train.json").read_text())["ndcg@10"]
    for row in (result["lengths"][0], result["injection"][0]):
        assert row["ndcg@10"] == pytest.approx(evaluated, abs=1e-6) and set(row["retained"].values()) == {1}
    for row in result["lengths"][2:]:
        kept = row["ndcg@10"] / result["lengths"][result["poolings"].index(row["pooling"])]["ndcg@10"]
        assert row["retained"]["ndcg@10"] == pytest.approx(kept)
    gini = {pooling: [*values["gini"].values()] for pooling, values in result["by_query"].items()}
    (found,) = (row for row in result["pairs"] if row["metric"] == "gini")
    assert found["models"] == ["max", "softmax=0.1"] and found["p"] == student(np.subtract(*reversed(gini.values())))
    page = (folder / "robustness.html").read_text()
    assert "http://" not in page and "https://" not in page and page.count("data:image/svg+xml;base64,") == 4
    assert "nDCG@10 / Recall@1" in done.stdout and str(folder / "robustness.png") in done.stdout
    model, data = folder / "model", write_folder(tmp_path / "data")
    for words, said in (
        ([model, "--beir", data, "--output", model], f"--output {model}/robustness.json cannot"),
        ([file, "--set", "evaluation.rows=0"], "tiny has no data to evaluate on; name one collection with --beir"),
    ):
        done = fastmaxsim(["robustness", *words])
        assert done.exit_code == 2 and done.stderr.startswith(f"fastmaxsim: {said}")
