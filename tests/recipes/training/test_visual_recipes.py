"""The recipes for images of pages, end to end on tiny models, processors and pages made on the spot."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.support.paths import ROOT

pytest.importorskip("colpali_engine", reason='needs colpali-engine: pip install -e ".[test]"')

import torch
from datasets import Dataset, Features, Image, List, Value
from safetensors.torch import load_file

from pylate_fastmaxsim.ops.pooled import pooled_scores
from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.evaluation.evaluate import collection_of_pages, evaluate, evaluate_held_out
from pylate_fastmaxsim.recipes.kinds.pages import CLASSES
from pylate_fastmaxsim.recipes.load import dump_recipe, load_recipe
from pylate_fastmaxsim.recipes.models.load import load_model, load_trained
from pylate_fastmaxsim.recipes.models.retriever import retriever_of
from pylate_fastmaxsim.recipes.training.inputs import load_data
from pylate_fastmaxsim.recipes.training.train import train
from tests.support.command_line import fastmaxsim
from tests.support.launcher import launch
from tests.support.recipe_runs import command
from tests.support.tiny_recipe import text
from tests.support.visual_models import build_visual_model, page

RECIPES = {"colqwen2": "colqwen_vidore", "colpali": "colpali_vidore"}
RECIPE_FOLDER = ROOT / "recipes"
ROWS = 22
STEPS = 4


@pytest.fixture(scope="session")
def visual_model(tmp_path_factory):
    """``visual_model(kind)``: the folder of a tiny model, built once per session."""
    built: dict[str, str] = {}

    def folder(kind: str) -> str:
        if kind not in built:
            built[kind] = build_visual_model(tmp_path_factory.mktemp(kind), kind)
        return built[kind]

    return folder


@pytest.fixture(scope="session")
def pages(tmp_path_factory) -> Path:
    """A folder laid out as a ViDoRe data set on the Hub: queries, and images in Parquet."""
    folder = tmp_path_factory.mktemp("data")
    rows = {
        "query": [text(number, 2 + number % 6) for number in range(ROWS)],
        "image": [page(number) for number in range(ROWS)],
        "negatives": [[page(number + 50), page(number + 90)] for number in range(ROWS)],
        "uneven": [[page(number)] * (1 + number % 2) for number in range(ROWS)],
        "source": ["made"] * ROWS,
    }
    features = {"query": Value("string"), "image": Image(), "source": Value("string")}
    features |= dict.fromkeys(("negatives", "uneven"), List(Image()))
    (folder / "data").mkdir()
    Dataset.from_dict(rows, features=Features(features)).to_parquet(folder / "data" / "train-00000-of-00001.parquet")
    return folder


def few_steps(kind: str, model: str, pages: Path, output: Path, *overrides: str) -> list[str]:
    """Overrides under which a shipped recipe trains for some steps on a CPU."""
    training = {"per_device_train_batch_size": 4, "max_steps": STEPS, "learning_rate": 0.005, "warmup_steps": 0}
    training |= {"save_steps": 2, "logging_steps": 1, "report_to": "none"}
    training |= {"use_cpu": "true", "dataloader_num_workers": 0}
    settings = [f"output_dir={output}", f"model.name_or_path={model}", "model.lora.r=4", f"data.name={pages}"]
    settings += [f"training.{key}={value}" for key, value in training.items()] + ["evaluation.rows=6"]
    if kind == "colqwen2":
        settings.append("model.max_visual_tokens=9")
    return [*settings, *overrides]


@pytest.fixture
def recipe(visual_model, pages, tmp_path):
    def load(kind: str, *overrides: str, output: str = "out"):
        options = few_steps(kind, visual_model(kind), pages, tmp_path / output, *overrides)
        return load_recipe(f"{RECIPE_FOLDER}/{RECIPES[kind]}.yaml", options)

    return load


def losses(result: dict) -> list[float]:
    return [loss for _, loss in result["losses"]]


@pytest.mark.e2e
@pytest.mark.parametrize("kind", RECIPES)
def test_the_shipped_recipe_trains_alike_both_ways(kind, recipe, tmp_path, monkeypatch):
    from pylate_fastmaxsim.integrations.colpali import losses as colpali_losses

    scored = []
    monkeypatch.setattr(
        colpali_losses, "pooled_scores", lambda *args, **kwargs: scored.append(args) or pooled_scores(*args, **kwargs)
    )
    stock = train(recipe(kind, "fast.enabled=false", output="stock"))
    assert not scored
    fast = train(recipe(kind, output="fast"))
    assert len(scored) == STEPS
    assert len(losses(stock)) == STEPS and losses(stock)[0] != losses(stock)[-1]
    assert losses(fast) == pytest.approx(losses(stock), rel=1e-4)
    assert fast["ndcg@10"] == pytest.approx(stock["ndcg@10"]) and 0 < fast["ndcg@10"] <= 1
    card = (tmp_path / "fast" / "model" / "README.md").read_text()
    assert "(colpali-engine 0.3." in card and RECIPES[kind] in card


LOAD_WITHOUT_US = """
import sys
sys.modules["pylate_fastmaxsim"] = None  # importing it fails
import torch
from colpali_engine import models
kind, base, folder, pages, encoded = sys.argv[1:]
if base == folder:
    model = getattr(models, kind).from_pretrained(folder)
else:
    from peft import PeftModel
    model = PeftModel.from_pretrained(getattr(models, kind).from_pretrained(base), folder)
processor = getattr(models, kind + "Processor").from_pretrained(folder)
images, queries = torch.load(pages, weights_only=False)
model.eval()
with torch.no_grad():
    batches = (processor.process_images(images), processor.process_queries(queries))
    torch.save([model(**batch) for batch in batches], encoded)
"""


@pytest.mark.process
@pytest.mark.parametrize(("kind", "lora"), [("colqwen2", True), ("colpali", False)], ids=["adapters", "all weights"])
def test_the_saved_model_loads_without_this_package(kind, lora, recipe, tmp_path):
    loaded = recipe(kind, *([] if lora else ["model.lora=null"]))
    result = train(loaded)
    folder = result["model"]
    base = loaded.model.name_or_path if lora else folder
    images, queries = [page(0), page(1)], [text(1, 3), text(2, 5)]
    torch.save((images, queries), tmp_path / "pages")
    files = [base, folder, str(tmp_path / "pages"), str(tmp_path / "encoded")]
    program = [sys.executable, "-c", LOAD_WITHOUT_US, CLASSES[kind][0].__name__, *files]
    done = subprocess.run(program, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    over = train(loaded)
    assert over["resumed_from"] == "checkpoint-4" and over["ndcg@10"] == pytest.approx(result["ndcg@10"])
    trained = load_trained(loaded.model, Path(folder), "cpu")
    assert evaluate(loaded, trained, load_data(loaded))["ndcg@10"] == result["ndcg@10"]
    untrained = load_model(loaded.model, "cpu", loaded.training.seed)
    processor = trained.processor
    batches = (processor.process_images(images), processor.process_queries(queries))
    for batch, got in zip(batches, torch.load(tmp_path / "encoded"), strict=True):
        with torch.no_grad():
            torch.testing.assert_close(got, trained.model.eval()(**batch), rtol=1e-4, atol=1e-5)
            assert not torch.allclose(got, untrained.model.eval()(**batch), atol=1e-3)


@pytest.mark.e2e
def test_a_loss_with_negatives(recipe):
    overrides = ["loss={name: colbert_negative_ce, temperature: 0.5, in_batch_term_weight: 0.3}"]
    overrides += ["training.max_steps=2", "data.columns=[query, image, negatives]"]
    stock = train(recipe("colqwen2", "fast.enabled=false", *overrides, output="stock"))
    fast = train(recipe("colqwen2", *overrides, output="fast"))
    assert losses(fast) == pytest.approx(losses(stock), rel=1e-4)


@pytest.mark.e2e
def test_gradient_checkpointing_changes_nothing(recipe):
    kept = train(recipe("colpali", "training.gradient_checkpointing=false", output="kept"))
    assert losses(train(recipe("colpali"))) == pytest.approx(losses(kept), rel=1e-5)


@pytest.mark.e2e
def test_gradient_concentration_is_logged_and_changes_nothing(recipe, tmp_path):
    smooth = ["loss={name: colbert, use_smooth_max: true, tau: 0.2}"]
    logged = {}
    for name, overrides in {"hard": [], "smooth": smooth}.items():
        overrides = [*overrides, "training.max_steps=2"]
        plain = train(recipe("colqwen2", *overrides, output=f"{name}-plain"))
        result = train(recipe("colqwen2", "training.log_gradient_concentration=1", *overrides, output=name))
        assert losses(result) == losses(plain)
        state = json.loads((tmp_path / name / "checkpoint-2" / "trainer_state.json").read_text())
        logged[name] = [entry for entry in state["log_history"] if "gradient_concentration/score_gini" in entry]
        assert [entry["step"] for entry in logged[name]] == [0, 1, 2]
    first, second = (rows[0]["gradient_concentration/score_gini"] for rows in logged.values())
    assert 1 > first > second > 0 and logged["hard"][0]["gradient_concentration/score_documents"] == 8
    assert not any("loss_gini" in name for name in logged["hard"][0])


@pytest.mark.e2e
def test_compare(visual_model, pages, tmp_path):
    kind = "colqwen2"
    overrides = few_steps(kind, visual_model(kind), pages, tmp_path / "out")
    done = command("compare", RECIPE_FOLDER / f"{RECIPES[kind]}.yaml", *overrides)
    assert done.exit_code == 0, done.output
    comparison = json.loads((tmp_path / "out" / "compare.json").read_text())
    stock, fast = comparison["runs"]["stock"], comparison["runs"]["fast"]
    for run in (stock, fast):
        assert run["status"] == "finished" and run["steps"] == STEPS and run["warnings"] == []
        assert 0 <= run["padding"] < 0.5 and run["environment"]["colpali-engine"] == version("colpali-engine")
    assert comparison["summary"]["largest_loss_difference"] < 1e-3
    assert comparison["summary"]["ndcg@10_difference"] == pytest.approx(0)


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("model.lora.target_modules=nothing", "model.name_or_path .* cannot be loaded: .*nothing.* not found"),
        ("data.columns=[query, source]", "'source' must hold images, but it holds Value"),
        ("data.columns=[image, query]", "'image' must hold text"),
        ("data.columns=[query, image, negatives]", r"data.columns must be \[query, image\] for the loss colbert"),
        (
            "loss.name=colbert_negative_ce data.columns=[query,image,uneven]",
            "'uneven' must hold the same number of images, but rows hold 1 to 2",
        ),
        ("loss.name=colbert_negative_ce", r"data.columns must be \[query, image, negatives\] for the loss colbert_neg"),
    ],
)
def test_misuse_is_one_sentence(override, sentence, recipe, tmp_path):
    with pytest.raises(RecipeError, match=sentence) as error:
        train(recipe("colqwen2", *override.replace(", ", ",").split()))
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


def test_a_missing_colpali_engine_is_named_with_what_installs_it(recipe, monkeypatch):
    loaded = recipe("colqwen2")
    monkeypatch.setitem(sys.modules, "colpali_engine", None)
    monkeypatch.delitem(sys.modules, "pylate_fastmaxsim.recipes.kinds.pages", raising=False)
    with pytest.raises(RecipeError, match=r'pip install "pylate-fastmaxsim\[pylate,recipes,colpali\]"'):
        train(loaded)


@pytest.mark.e2e  # ranx compiles for seconds
@pytest.mark.parametrize(
    ("queries", "images"),
    [([text(1, 3), text(2, 4), text(3, 5)], [page(1)] * 3), ([text(1, 3)] * 3, [page(1), page(2), page(3)])],
    ids=["pages", "queries"],
)
def test_equal_pages_and_equal_queries_count_as_one(recipe, queries, images):
    loaded = recipe("colqwen2")
    features = Features({"query": Value("string"), "image": Image()})
    held_out = Dataset.from_dict({"query": queries, "image": images}, features=features)
    assert evaluate_held_out(loaded, retriever_of(load_model(loaded.model, "cpu", 0)), held_out) == {"ndcg@10": 1.0}


def test_a_model_of_nan_has_no_metrics(recipe, caplog):
    loaded = recipe("colqwen2")
    retriever = load_model(loaded.model, "cpu", 0)
    with torch.no_grad():
        retriever.model.custom_text_proj.weight.fill_(torch.nan)
    assert evaluate(loaded, retriever, load_data(loaded)) == {"ndcg@10": None}
    assert "embeddings of the model are NaN or infinite" in caplog.messages[-1]


@pytest.mark.e2e
def test_evaluate_ranks_pages_as_the_evaluation_of_a_training_does(recipe, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    files, expected = [], []
    for kind in RECIPES:
        loaded = recipe(kind, output=kind)
        retriever = load_model(loaded.model, "cpu", 0)
        retriever.save_pretrained(f"{loaded.output_dir}/model")
        files.append(tmp_path / f"{kind}.yaml")
        files[-1].write_text(dump_recipe(loaded))
        collection = collection_of_pages(load_data(loaded).held_out)
        queries = retriever.encode(list(collection.queries.values()), 4, is_query=True)
        scores = retriever.processor.score(queries, retriever.encode(collection.corpus["image"], 4, is_query=False))
        # The page of a query is the one of its row. All pages are equal for one of the queries.
        ranks = (scores > scores.diag()[:, None]).sum(1) + (scores == scores.diag()[:, None]).tril(-1).sum(1)
        expected.append(float((1 / (ranks + 2).log2()).mean()))
    result = tmp_path / "result.json"
    arguments = ["evaluate", *files, "--index", tmp_path / "index", "--json", result, "--batch-size", 4]
    for encoded in (6, 0):
        done = fastmaxsim(list(map(str, arguments)))
        assert done.exit_code == 0, done.output
        written = json.loads(result.read_text())
        assert [model["encoded_documents"] for model in written["models"]] == [encoded, encoded]
        assert [model["metrics"]["ndcg@10"] for model in written["models"]] == pytest.approx(expected)
    for more in (["--beir", tmp_path], [tmp_path / "text"]):
        (tmp_path / "text").mkdir(exist_ok=True)
        (tmp_path / "text" / "config_sentence_transformers.json").write_text('{"model_type": "ColBERT"}')
        done = fastmaxsim(list(map(str, ["evaluate", *files, *more])))
        assert "colqwen_vidore retrieves pages; evaluate it without --beir" in done.stderr


def test_pages_are_kept_as_they_are_stored(tmp_path):
    page(1).save(tmp_path / "page.jpg", quality=30)  # which would lose more if it were encoded again
    image = {"bytes": (tmp_path / "page.jpg").read_bytes(), "path": None}
    rows = {"query": ["a", "b"], "image": [image, image]}
    held_out = Dataset.from_dict(rows, features=Features({"query": Value("string"), "image": Image()}))
    collection = collection_of_pages(held_out)
    (kept,) = collection.corpus["image"]
    assert kept.tobytes() == held_out[0]["image"].tobytes() and collection.queries == {"q0": "a", "q1": "b"}


LAYERS = {"colqwen2": "Qwen2VLDecoderLayer", "colpali": "GemmaDecoderLayer"}


@pytest.mark.process
@pytest.mark.parametrize(("kind", "divided"), [("colqwen2", False), ("colpali", True)], ids=["ddp", "fsdp"])
def test_two_processes_go_on_where_they_stopped(kind, divided, visual_model, pages, tmp_path):
    files = []
    for name, overrides in {"adapters": [], "all": ["model.lora=null"]}.items():
        overrides += ["training.per_device_train_batch_size=3", "training.max_steps=5"]
        options = few_steps(kind, visual_model(kind), pages, tmp_path, "training.save_total_limit=3", *overrides)
        files.append(tmp_path / f"{name}.yaml")
        files[-1].write_text(dump_recipe(load_recipe(f"{RECIPE_FOLDER}/{RECIPES[kind]}.yaml", options)))
    done = launch("fsdp" if divided else "ddp", tmp_path, files, LAYERS[kind])
    assert done.returncode == 0, done.stderr[-3000:]
    for name in ("adapters", "all"):
        whole, parts = (json.loads((tmp_path / f"{name}-0.json").read_text())[key] for key in ("whole", "parts"))
        assert parts["resumed_from"] == "checkpoint-2" and parts["losses"] == whole["losses"]
        assert parts["ndcg@10"] == whole["ndcg@10"]
    trained, base = (
        load_file(Path(folder, "model.safetensors"))
        for folder in (tmp_path / "all-whole" / "model", visual_model(kind))
    )
    (embeddings,) = (name for name in trained if name.endswith("embed_tokens.weight"))
    assert not torch.equal(trained[embeddings], base[embeddings])
    first, second = (set(json.loads((tmp_path / f"written-{rank}.json").read_text())) for rank in (0, 1))
    assert not {path for path in first & second if not path.endswith(".lock") and not path.startswith("/dev/")}
