import csv
import json
import os
import shutil
from pathlib import Path

import pytest
from scipy.stats import ttest_rel

from pylate_fastmaxsim.recipes.evaluation import ranking
from pylate_fastmaxsim.recipes.evaluation.evaluate import evaluate as evaluate_recipe
from pylate_fastmaxsim.recipes.load import load_recipe
from pylate_fastmaxsim.recipes.models.load import load_retriever
from pylate_fastmaxsim.recipes.models.retriever import Retriever
from pylate_fastmaxsim.recipes.training.inputs import load_data, prepare
from tests.support.beir_folder import write_folder
from tests.support.case_tables import case_table
from tests.support.command_line import Done, fastmaxsim
from tests.support.recipe_kinds import LATE as HOST
from tests.support.recipe_kinds import tiny_of
from tests.support.saved_models import LATE, SPARSE, STATIC, save_retriever
from tests.support.searches import assert_same, read_run, search
from tests.support.static_cases import save_table
from tests.support.tiny_recipe import write

METRICS = ["ndcg@10", "mrr@10", "recall@100", "recall@1000"]


@pytest.fixture
def data(tmp_path) -> Path:
    return write_folder(tmp_path / "data")


def evaluate(*arguments: object, code: int = 0) -> Done:
    return fastmaxsim(["evaluate", *arguments], code=code)


def rows_of(file: Path) -> list[dict]:
    if file.suffix == ".jsonl":
        return [json.loads(line) for line in file.read_text().splitlines()]
    return list(csv.DictReader(file.open(), delimiter="\t"))


@pytest.mark.e2e  # ranx compiles for seconds
def test_several_models_on_one_collection(saved, encoder, data, tmp_path, monkeypatch):
    result, runs, index = tmp_path / "out" / "result.json", tmp_path / "runs", tmp_path / "index"
    other = save_retriever(LATE, tmp_path / "other" / Path(saved(LATE)).name, encoder("modernbert"))
    names = [saved(LATE), saved(SPARSE), other]
    options = ["--beir", data, "--json", result, "--run", runs, "--index", index, "--batch-size", 8]
    done = evaluate(*names, *options, "--per-query", tmp_path / "q.jsonl")
    written = json.loads(result.read_text())
    assert (written["queries"], written["documents"], written["test"]) == (6, 150, "student")
    assert [model["kind"] for model in written["models"]] == [LATE, SPARSE, LATE]
    # Two have one name, and the third is in a folder `model`.
    common = os.path.commonpath([saved(LATE), other])
    labels = [os.path.relpath(saved(LATE), common), "sparse", os.path.relpath(other, common)]
    assert [model["label"] for model in written["models"]] == labels
    rows = rows_of(tmp_path / "q.jsonl")
    assert [(row["query"], row["model"]) for row in rows] == [(f"q{n}", label) for label in labels for n in range(6)]
    own = {label: [row for row in rows if row["model"] == label] for label in labels}
    for path, model in zip(names, written["models"], strict=True):
        for metric in METRICS:
            mean = sum(row[metric] for row in own[model["label"]]) / 6
            assert mean == pytest.approx(model["metrics"][metric]) and f"{mean:.4f}" in done.stdout
        search(path, "--beir", data, "--run", tmp_path / "run")
        assert_same(Path(model["run"]), tmp_path / "run")
    assert len(list(runs.iterdir())) == len(list(index.iterdir())) == 3
    assert len(written["pairs"]) == 3 * len(METRICS)
    for row in written["pairs"]:
        left, right = ([each[row["metric"]] for each in own[label]] for label in row["models"])
        assert row["difference"] == pytest.approx(sum(right) / 6 - sum(left) / 6, abs=1e-12)
        assert row["p"] == (1.0 if left == right else pytest.approx(ttest_rel(right, left).pvalue))
    assert "Student's paired t-test over 6 queries, p corrected for 3 pairs (Holm)" in done.stdout

    # One model alone is called otherwise, and finds its index all the same.
    with monkeypatch.context() as patch:
        patch.setattr(ranking, "encode_corpus", None)
        done = evaluate(other, *options, "--per-query", tmp_path / "q.tsv")
    assert "Student" not in done.stdout
    (model,) = json.loads(result.read_text())["models"]
    assert (model["label"], model["encoded_documents"]) == (Path(other).name, 0)
    assert model["metrics"] == pytest.approx(written["models"][2]["metrics"])
    rows = rows_of(tmp_path / "q.tsv")
    assert [float(row["mrr@10"]) for row in rows] == [row["mrr@10"] for row in own[labels[2]]]
    done = evaluate(saved(SPARSE), other, *options, "--format", "float16", "--test", "fisher")
    assert len(list(index.iterdir())) == 4 and "Fisher's randomisation test over 6 queries" in done.stdout


@pytest.mark.e2e
def test_pool_factors_make_a_curve(saved, encoder, data, tmp_path):
    other = save_retriever(LATE, tmp_path / "other" / "two", encoder("modernbert"))
    options = ["--beir", data, "--index", tmp_path / "index", "--run", tmp_path / "runs", "--json", tmp_path / "result"]
    for _ in range(2):  # of indexes that are there as well
        done = evaluate(other, saved(LATE), *options, "--pool-factor", "1,2,3.5", "--plot", tmp_path / "curve.png")
    written = json.loads((tmp_path / "result").read_text())
    one = Path(saved(LATE)).name
    labels = [f"{name}{pool}" for name in ("two", one) for pool in ("", "-pool-2", "-pool-3.5")]
    assert [model["label"] for model in written["models"]] == labels
    full, half, less = (model["vectors"] for model in written["models"][3:])
    assert 0 < less < half < full and f"{half:,}" in done.stdout
    against = [(0, 1), (0, 2), (3, 4), (3, 5), (0, 3), (1, 4), (2, 5)]
    assert {tuple(row["models"]) for row in written["pairs"]} == {(labels[a], labels[b]) for a, b in against}
    search(saved(LATE), "--beir", data, "--pool-factor", 2, "--run", tmp_path / "run")
    assert_same(tmp_path / "runs" / f"{one}-pool-2.trec", tmp_path / "run")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.e2e
def test_a_first_stage_is_compared_with_exhaustive_search(saved, data, tmp_path):
    runs, result = tmp_path / "runs", tmp_path / "result.json"
    options = ["--beir", data, "--run", runs, "--json", result, "--first-stage", "bm25", "--candidates", 12]
    done = evaluate(saved(LATE), saved(SPARSE), *options)
    written = json.loads(result.read_text())
    whole, behind, sparse = written["models"]
    name = whole["label"]
    assert (behind["label"], sparse["kind"]) == (f"{name} after bm25", SPARSE)
    found, best = (read_run(Path(model["run"])) for model in (behind, whole))
    shares = [len({*found[query]} & {*[*best[query]][:10]}) for query in best]
    assert behind["overlap@10"] == pytest.approx(sum(shares) / 10 / len(best)) and 0 < behind["overlap@10"] < 1
    assert f"{behind['overlap@10']:.1%}" in done.stdout and "overlap@10" not in whole
    assert all(set(row) <= set(best[query]) and len(row) <= 12 for query, row in found.items())
    assert [name, f"{name} after bm25"] in [row["models"] for row in written["pairs"]]
    assert whole["encoded_documents"] == 150 > behind["encoded_documents"] > 0


@pytest.mark.parametrize("options", [[], ["--no-exact"]])
def test_static_models_rank_by_maxsim_by_bounds_or_by_means_and_only_vectors_are_kept(
    options, saved, encoder, data, tmp_path
):
    runs, index, table = (tmp_path / name for name in ("runs", "index", "table"))
    save_table("StaticEmbedding", table, encoder("bert"))
    evaluate(saved(STATIC), "--dense", table, "--beir", data, "--run", runs, "--index", index, *options)
    for label, *command in ((Path(saved(STATIC)).name, saved(STATIC), *options), ("table-dense", table, "--dense")):
        search(*command, "--beir", data, "--run", tmp_path / "run")
        assert_same(runs / f"{label}.trec", tmp_path / "run")
    assert len(list(index.iterdir())) == 1 + len(options)


@pytest.fixture
def recipe(saved, tmp_path) -> Path:
    """A recipe with pooling, whose model is there as if it were trained."""
    shutil.copytree(saved(LATE), tmp_path / "out" / "model")
    return write(tmp_path, tiny_of(HOST, tmp_path, loss={"pooling": {"top_k": 3}}))


@pytest.mark.e2e
def test_a_recipe_is_evaluated_on_the_rows_that_it_holds_out_as_in_training(recipe, saved, tmp_path):
    evaluate(recipe, saved(LATE), "--index", tmp_path / "index", "--json", tmp_path / "result.json")
    written = json.loads((tmp_path / "result.json").read_text())
    loaded = load_recipe(recipe)
    rows = load_data(prepare(loaded))
    expected = evaluate_recipe(loaded, load_retriever(saved(LATE), "cpu"), rows)
    first, second = written["models"]
    assert first["metrics"]["ndcg@10"] == pytest.approx(expected["ndcg@10"], abs=1e-6)
    assert written["collection"] == "rows held out by tiny" and written["queries"] == len(set(rows.held_out["query"]))
    assert (first["label"], first["pooling"], second["pooling"]) == ("tiny", "TopK(k=3)", "Max()")
    assert first["metrics"] != second["metrics"] or HOST != "colbert"  # where both rank the pairs without a mistake


@case_table("""
arguments | said
MODEL | name a collection in BEIR's layout with --beir, or give the recipe of a model.
MODEL --dense MODEL --beir DATA | --dense is for a StaticEmbedding or a model of model2vec, but MODEL is a
MODEL MODEL/ --beir DATA | each model must be given once, but MODEL/ is given twice.
link MODEL --beir DATA | each model must be given once, but MODEL is given twice.
MODEL --beir DATA --set a=1 | --set overrides a key of a recipe, and no recipe is given.
MODEL --beir DATA --per-query q.csv | --per-query must be a file that ends in .jsonl or .tsv, got q.csv.
MODEL --beir DATA --per-query DATA/a.tsv --json DATA/a.tsv | --per-query and --json must be two files.
MODEL --beir DATA --json DATA/queries.jsonl | --json DATA/queries.jsonl cannot be written: it is what
MODEL --beir DATA --per-query DATA/qrels/a.tsv | --per-query DATA/qrels/a.tsv cannot be written: it is
MODEL --beir DATA --run MODEL | --run MODEL/NAME.trec cannot be written: it is in MODEL, which
MODEL --beir DATA --run DATA/corpus.jsonl | --run DATA/corpus.jsonl cannot be made: File exists.
a/x b/x a-x --beir DATA --run r | --run: a/x and a-x would be written to one file, r/a-x.trec; evaluate them
MODEL --beir DATA --format int8 | --format is that of token embeddings in an index; it needs --index
MODEL --beir DATA --plot a.pdf | --plot must be a file that ends in .png, got a.pdf.
quickstart | quickstart: there is no model in
RECIPE --set evaluation.rows=0 | tiny has no data to evaluate on; name one collection with --beir.
RECIPE OTHER | tiny and other are evaluated on different data; name one collection for all with --beir.
""")
def test_bad_input_is_one_line_before_anything_is_encoded(arguments, said, saved, recipe, data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Retriever, "encode", None)
    model = Path(saved(LATE))
    (tmp_path / "link").symlink_to(model)
    for name in ("a/x", "b/x", "a-x"):
        shutil.copytree(model, tmp_path / name)
    other = write(tmp_path, tiny_of(HOST, tmp_path, evaluation={"rows": 6}), "other")
    names = {"MODEL": model, "NAME": model.name, "DATA": data, "RECIPE": recipe, "OTHER": other}
    for name, path in names.items():
        arguments, said = arguments.replace(name, str(path)), said.replace(name, str(path))
    done = evaluate(*arguments.split(), code=2)
    assert done.stderr.startswith(f"fastmaxsim: {said}") and not done.stdout
