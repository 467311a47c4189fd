"""``fastmaxsim evaluate``: its numbers are those of the search and of training, files hold them, bad input is one line."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import pytest
import torch
from scipy.stats import ttest_rel
from tokenizers import Tokenizer, normalizers, pre_tokenizers
from tokenizers.models import WordLevel

from pylate_fastmaxsim import StaticLateInteraction
from pylate_fastmaxsim.recipes.data import collection as beir
from pylate_fastmaxsim.recipes.evaluation import ranking
from pylate_fastmaxsim.recipes.evaluation.evaluate import evaluate as evaluate_recipe
from pylate_fastmaxsim.recipes.load import load_recipe
from pylate_fastmaxsim.recipes.models.load import load_retriever
from pylate_fastmaxsim.recipes.models.retriever import Retriever, retriever_of
from pylate_fastmaxsim.recipes.targets import find_targets
from pylate_fastmaxsim.recipes.training.inputs import load_data, prepare
from tests.support import models
from tests.support.beir_folder import write_folder
from tests.support.command_line import fastmaxsim
from tests.support.paths import CRANFIELD
from tests.support.sparse_encoders import build_sparse_encoder
from tests.support.tiny_recipe import tiny, write

METRICS = ["ndcg@10", "mrr@10", "recall@100", "recall@1000"]


@pytest.fixture(scope="module")
def saved(encoder, tmp_path_factory) -> dict[str, str]:
    """The folder of a tiny model of each kind, and of another ColBERT that is called as the first."""
    folder = tmp_path_factory.mktemp("saved")
    models.load_model(encoder("bert")).save_pretrained(str(folder / "colbert"))
    models.load_model(encoder("modernbert")).save_pretrained(str(folder / "other" / "colbert"))
    sparse = build_sparse_encoder(folder / "splade", encoder("bert"))
    return {"colbert": str(folder / "colbert"), "sparse": sparse, "other": str(folder / "other" / "colbert")}


@pytest.fixture
def data(tmp_path) -> Path:
    return write_folder(tmp_path / "data")


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def evaluate(*arguments: object, code: int = 0):
    done = fastmaxsim(["evaluate", *map(str, arguments)])
    assert done.exit_code == code, done.output
    return done


def rows_of(file: Path) -> list[dict]:
    if file.suffix == ".jsonl":
        return [json.loads(line) for line in file.read_text().splitlines()]
    return list(csv.DictReader(file.open(), delimiter="\t"))


@pytest.mark.e2e  # ranx compiles for seconds
def test_several_models_on_one_collection(saved, data, tmp_path, monkeypatch):
    result, runs, index = tmp_path / "out" / "result.json", tmp_path / "runs", tmp_path / "index"
    options = ["--beir", data, "--json", result, "--run", runs, "--index", index, "--batch-size", 8]
    done = evaluate(*saved.values(), *options, "--per-query", tmp_path / "q.jsonl")
    written = json.loads(result.read_text())
    assert (written["queries"], written["documents"], written["test"]) == (6, 150, "student")
    # Two are called colbert.
    labels = [saved["colbert"], "model", saved["other"]]
    assert [model["label"] for model in written["models"]] == labels
    collection = beir.load_collection(str(data))
    rows = rows_of(tmp_path / "q.jsonl")
    assert [(row["query"], row["model"]) for row in rows] == [(f"q{n}", label) for label in labels for n in range(6)]
    own = {label: [row for row in rows if row["model"] == label] for label in labels}
    for path, model in zip(saved.values(), written["models"], strict=True):
        expected = ranking.evaluate_collection(retriever_of(load_retriever(path, "cpu")), collection, batch_size=8)
        assert {name: model["metrics"][name] for name in ranking.METRICS} == pytest.approx(
            {name: expected[name] for name in ranking.METRICS}, abs=1e-9
        )
        for metric in METRICS:
            mean = sum(row[metric] for row in own[model["label"]]) / 6
            assert mean == pytest.approx(model["metrics"][metric]) and f"{mean:.4f}" in done.stdout
        again = fastmaxsim(["search", path, "--beir", str(data), "--run", str(tmp_path / "run")])
        assert again.exit_code == 0
        pairs = [Path(file).read_text().splitlines() for file in (model["run"], tmp_path / "run")]
        for found, other in zip(*pairs, strict=True):
            assert found.split()[:4] == other.split()[:4]
            assert float(found.split()[4]) == pytest.approx(float(other.split()[4]), rel=1e-5)
    assert len(list(runs.iterdir())) == len(list(index.iterdir())) == 3
    assert len(written["pairs"]) == 3 * len(METRICS)
    for row in written["pairs"]:
        left, right = ([each[row["metric"]] for each in own[label]] for label in row["models"])
        assert row["difference"] == pytest.approx(sum(right) / 6 - sum(left) / 6, abs=1e-12)
        assert row["p"] == (1.0 if left == right else pytest.approx(ttest_rel(right, left).pvalue))
    assert "Student's paired t-test over 6 queries, p corrected for 3 pairs (Holm)" in done.stdout

    # One model alone is called otherwise, and finds its index all the same.
    monkeypatch.setattr(ranking, "encode_corpus", None)
    done = evaluate(saved["other"], *options, "--per-query", tmp_path / "q.tsv")
    assert "Student" not in done.stdout
    (model,) = json.loads(result.read_text())["models"]
    assert (model["label"], model["encoded_documents"]) == ("colbert", 0)
    assert model["metrics"] == pytest.approx(written["models"][2]["metrics"])
    rows = rows_of(tmp_path / "q.tsv")
    assert [float(row["mrr@10"]) for row in rows] == [row["mrr@10"] for row in own[saved["other"]]]
    monkeypatch.undo()
    # Another format has another index.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    evaluate(saved["sparse"], saved["other"], *options, "--format", "float16")
    assert len(list(index.iterdir())) == 4  # a sparse one has none


@pytest.fixture
def recipe(saved, tmp_path) -> Path:
    """A recipe with pooling, whose model is there as if it were trained."""
    values = tiny(tmp_path, loss={"pooling": {"top_k": 3}})
    shutil.copytree(saved["colbert"], tmp_path / "out" / "model")
    return write(tmp_path, values)


@pytest.mark.e2e
def test_a_recipe_is_evaluated_on_the_rows_that_it_holds_out_as_in_training(recipe, saved, tmp_path):
    evaluate(recipe, saved["colbert"], "--index", tmp_path / "index", "--json", tmp_path / "result.json")
    written = json.loads((tmp_path / "result.json").read_text())
    loaded = load_recipe(recipe)
    rows = load_data(prepare(loaded))
    expected = evaluate_recipe(loaded, load_retriever(saved["colbert"], "cpu"), rows)
    first, second = written["models"]
    assert first["metrics"]["ndcg@10"] == pytest.approx(expected["ndcg@10"], abs=1e-6)
    assert written["collection"] == "rows held out by tiny" and written["queries"] == len(set(rows.held_out["query"]))
    # The same weights by the maximum.
    assert (first["label"], first["pooling"], second["pooling"]) == ("tiny", "TopK(k=3)", "Max()")
    assert first["metrics"] != second["metrics"]


@pytest.mark.parametrize(
    "arguments, said",
    [
        ("COLBERT", "name a collection in BEIR's layout with --beir, or give the recipe of a model."),
        ("COLBERT --beir DATA --split dev", "--beir: the folder DATA must hold qrels/dev.tsv or qrels.tsv."),
        ("COLBERT ./none --beir DATA", "MODEL: there is no folder ./none."),
        ("COLBERT DATA --beir DATA", "MODEL DATA must be a ColBERT that PyLate has saved, a MultiVectorEncoder or "),
        ("COLBERT COLBERT --beir DATA", "each model must be given once, but COLBERT is given twice."),
        ("COLBERT COLBERT/ --beir DATA", "each model must be given once, but COLBERT/ is given twice."),
        ("LINK COLBERT --beir DATA", "each model must be given once, but COLBERT is given twice."),
        ("COLBERT --beir DATA --set a=1", "--set overrides a key of a recipe, and no recipe is given."),
        ("COLBERT --beir DATA --per-query q.csv", "--per-query must be a file that ends in .jsonl or .tsv, got q.csv."),
        ("COLBERT --beir DATA --per-query DATA/a.tsv --json DATA/a.tsv", "--per-query and --json must be two files."),
        ("COLBERT --beir DATA --json DATA/queries.jsonl", "--json DATA/queries.jsonl cannot be written: it is what"),
        (
            "COLBERT --beir DATA --json COLBERT/config.json",
            "--json COLBERT/config.json cannot be written: it is in COLBERT",
        ),
        ("COLBERT --beir DATA --per-query DATA/qrels/a.tsv", "--per-query DATA/qrels/a.tsv cannot be written: it is"),
        ("RECIPE --json RECIPE", "--json RECIPE cannot be written: it is what this command reads; choose another"),
        ("COLBERT --beir DATA --run COLBERT", "--run COLBERT/colbert.trec cannot be written: it is in COLBERT, which"),
        ("COLBERT --beir DATA --json DATA", "--json DATA cannot be written: it is a folder."),
        ("COLBERT --beir DATA --run DATA/corpus.jsonl", "--run DATA/corpus.jsonl cannot be made: File exists."),
        ("COLBERT --beir DATA --run taken", "--run taken/colbert.trec cannot be written: it is a folder."),
        (
            "a/x b/x a-x --beir DATA --run r",
            "--run: a/x and a-x would be written to one file, r/a-x.trec; evaluate them",
        ),
        ("COLBERT --beir DATA --format int8", "--format is that of token embeddings in an index; it needs --index"),
        ("COLBERT --beir DATA --index DATA/i --format x", "--format must be one of float32, bfloat16, float16, int8,"),
        ("none.yaml", "Cannot read the recipe none.yaml: No such file or directory."),
        ("quickstart", "quickstart: there is no model in "),
        ("colpali_vidore", "colpali_vidore: there is no model in runs/colpali_vidore/model; run `fastmaxsim train`"),
        ("RECIPE --set evaluation.rows=0", "tiny has no data to evaluate on; name one collection with --beir."),
        ("RECIPE OTHER", "tiny and other are evaluated on different data; name one collection for all with --beir."),
    ],
)
def test_bad_input_is_one_line_before_anything_is_encoded(arguments, said, saved, recipe, data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Retriever, "encode", None)
    (tmp_path / "taken" / "colbert.trec").mkdir(parents=True)
    (tmp_path / "link").symlink_to(saved["colbert"])
    for name in ("a/x", "b/x", "a-x"):
        shutil.copytree(saved["colbert"], tmp_path / name)
    other = write(tmp_path, tiny(tmp_path, evaluation={"rows": 6}), "other")
    names = {"COLBERT": saved["colbert"], "DATA": str(data), "RECIPE": str(recipe), "OTHER": str(other)}
    names["LINK"] = "link"
    for name, path in names.items():
        arguments, said = arguments.replace(name, path), said.replace(name, path)
    done = evaluate(*arguments.split(), code=2)
    assert done.stderr.startswith(f"fastmaxsim: {said}") and done.stderr.count("\n") == 1
    assert not done.stdout


def test_the_working_directory_is_called_as_the_folder(saved, monkeypatch):
    monkeypatch.chdir(saved["colbert"])
    assert [target.label for target in find_targets(["."])] == ["colbert"]


@pytest.mark.e2e
@pytest.mark.skipif(not CRANFIELD.exists(), reason=f"the Cranfield collection is not at {CRANFIELD}")
def test_cranfield_with_two_models(tmp_path):
    collection = beir.load_files_of_collection(*(CRANFIELD / f"{name}.jsonl" for name in ("corpus", "queries")))
    documents = beir.document_texts(collection.corpus[:])
    splitter, lower = pre_tokenizers.Whitespace(), normalizers.Lowercase()
    words = dict.fromkeys(
        word for each in documents for word, _ in splitter.pre_tokenize_str(lower.normalize_str(each))
    )
    tokenizer = Tokenizer(WordLevel({"[UNK]": 0} | {word: place for place, word in enumerate(words, 1)}, "[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = lower, splitter
    for name, options in {"bm25": {}, "counts": {"k1": 100.0, "b": 0.0}}.items():
        model = StaticLateInteraction.bm25(tokenizer, tokenizer.get_vocab_size(), **options)
        model.fit(documents).save(tmp_path / name)
    result = tmp_path / "result.json"
    evaluate(tmp_path / "counts", tmp_path / "bm25", "--beir", CRANFIELD, "--json", result, "--test", "fisher")
    written = json.loads(result.read_text())
    assert (written["queries"], written["documents"]) == (225, 1400)
    # Far apart at the top, and the same deep down, where both have found what shares a word with the query.
    _, bm25 = (model["metrics"] for model in written["models"])
    assert 0.38 < bm25["ndcg@10"] < 0.41
    pairs = {row["metric"]: row for row in written["pairs"]}
    assert pairs["ndcg@10"]["difference"] > 0.1 and pairs["ndcg@10"]["p"] == 0.0001
    assert pairs["recall@1000"]["p"] > 0.1
