"""Recipes: what is accepted, what is built, and what a run leaves."""

import json
import math
import os
import shutil
import statistics
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from paths import RECIPES

pytest.importorskip("datasets")
pytest.importorskip("pylate")

import PIL.Image
import torch
from datasets import Dataset, Features, Image, Value
from pylate import models
from test_shipped_recipes import kd_subsets
from tiny_recipe import hub_dataset, text, tiny, write

import pylate_fastmaxsim
from pylate_fastmaxsim.integrations.options import current_options
from pylate_fastmaxsim.recipes.comparison.compare import compare
from pylate_fastmaxsim.recipes.config.dump import dump_recipe
from pylate_fastmaxsim.recipes.config.schema import FastSection
from pylate_fastmaxsim.recipes.data.docstrings import docstring_pairs, split_docstring
from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.files.records import RECIPE_FILE
from pylate_fastmaxsim.recipes.load import load_recipe
from pylate_fastmaxsim.recipes.plugin import switched
from pylate_fastmaxsim.recipes.training import prepare as preparing
from pylate_fastmaxsim.recipes.training import train as training
from pylate_fastmaxsim.recipes.training.checkpoints import last_checkpoint
from pylate_fastmaxsim.recipes.training.inputs import load_data
from pylate_fastmaxsim.recipes.training.prepare import prepare
from pylate_fastmaxsim.recipes.training.warmup import batch_sizes


@pytest.mark.parametrize("name", sorted(path.stem for path in RECIPES.glob("*.yaml")))
def test_shipped_recipes_are_valid_and_survive_a_round_trip(name, tmp_path):
    recipe = load_recipe(RECIPES / f"{name}.yaml")
    (tmp_path / "dumped.yaml").write_text(dump_recipe(recipe))
    assert load_recipe(tmp_path / "dumped.yaml") == recipe
    assert recipe.name == name and not recipe.model.trust_remote_code


def test_every_option_of_the_fast_section_reaches_the_flag():
    section = FastSection(
        padding_free=False, compile=True, stock_masking=True, grad_filter="auto", ring=True, fused_head=False
    )
    assert all(value != getattr(FastSection(), key) for key, value in asdict(section).items() if key != "enabled")
    with switched(section):
        assert {"enabled": True, **asdict(current_options())} == asdict(section)


def test_the_result_of_a_run_that_diverged_is_json(tmp_path):
    values = tiny(tmp_path, training={"learning_rate": 1e30, "max_grad_norm": 0, "max_steps": 5})
    result = training.train(load_recipe(write(tmp_path, values)))
    losses = result["losses"]
    assert not all(math.isfinite(loss) for _, loss in losses)
    written = json.loads((tmp_path / "out/train.json").read_text(), parse_constant=pytest.fail)
    assert [loss for _, loss in written["losses"]] == [loss if math.isfinite(loss) else None for _, loss in losses]
    # NaN has an order as well, of which a metric could be made.
    assert result["ndcg@10"] is None and written["ndcg@10"] is None
    assert "ndcg" not in (tmp_path / "out/model/README.md").read_text().lower()
    assert (tmp_path / "out/model/model.safetensors").exists()


def test_an_override_changes_one_place_of_those_that_an_alias_makes_equal(tmp_path):
    file = tmp_path / "aliased.yaml"
    file.write_text(
        "{output_dir: out, model: {name_or_path: some/model}, loss: {name: distillation},"
        " data: {source: distillation, name: mined}, mining: {teacher: some/teacher,"
        " pairs: &rows {source: hub, name: some/rows, split: train}, corpus: *rows}}"
    )
    mining = load_recipe(file, ["mining.corpus.name=some/corpus", "mining.corpus.columns=[text]"]).mining
    assert (mining.corpus.name, mining.corpus.split, mining.corpus.columns) == ("some/corpus", "train", ["text"])
    assert (mining.pairs.name, mining.pairs.split, mining.pairs.columns) == ("some/rows", "train", None)


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        (
            "data.columns=[query, negative]",
            "data.columns: no column 'negative', the data has the columns query, positive.",
        ),
        ("data.columns=[positive, query]", "data.columns must start with the query column"),
        ("evaluation.rows=60", "evaluation.rows must leave at least one training batch, but the data has 60 rows"),
        ("loss.name=distillation", "data.columns must be [query, documents, scores] for distillation"),
        ("model.config_kwargs={num_hidden_layers: 3}", "model cannot be built: list index out of range"),
    ],
)
def test_a_recipe_that_does_not_fit_its_data_leaves_nothing_behind(override, sentence, tmp_path):
    output = tmp_path / "runs" / "out"
    recipe = load_recipe(write(tmp_path, tiny(tmp_path, "runs/out")), [override])
    with pytest.raises(RecipeError) as error:
        training.train(recipe)
    assert sentence in str(error.value)
    assert not output.parent.exists()


def test_too_few_rows_for_a_batch_name_its_size(tmp_path):
    few = ["evaluation.rows=0", "data.max_rows=3"]
    file = write(tmp_path, tiny(tmp_path, training={"max_steps": 1, "save_steps": None}))
    with pytest.raises(RecipeError, match="^training.per_device_train_batch_size must be at most 3, as many rows as "):
        load_data(load_recipe(file, few))
    # One that is not full is a batch as well.
    recipe = load_recipe(file, [*few, "training.dataloader_drop_last=false"])
    assert training.train(recipe)["steps"] == 1
    assert batch_sizes(3, recipe) == [3]


def repeated(kind: str, folder: Path) -> dict:
    """A recipe whose 20 queries stand in three rows each, with another document in each."""
    rows = [{"query": f"query {i % 20}", "positive": f"document {i} of query {i % 20}"} for i in range(60)]
    recipe = tiny(folder, evaluation={"rows": 10})
    if kind == "texts":
        (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return recipe
    if kind == "pages":
        pages = [PIL.Image.new("L", (8, 8), number) for number in range(60)]
        columns = {"query": [row["query"] for row in rows], "image": pages}
        Dataset.from_dict(columns, Features({"query": Value("string"), "image": Image()})).to_parquet(
            folder / "p.parquet"
        )
        recipe["model"] = {"kind": "colpali", "name_or_path": "some/model"}
        return recipe | {"data": {"source": "files", "files": [str(folder / "p.parquet")]}, "loss": {"name": "colbert"}}
    # A query may also have several ids.
    subsets = {
        "train": [{"query_id": i, "document_ids": [i, (i + 1) % 60], "scores": [1.0, 0.0]} for i in range(60)],
        "queries": [{"query_id": i, "text": row["query"]} for i, row in enumerate(rows)],
        "documents": [{"document_id": i, "text": row["positive"]} for i, row in enumerate(rows)],
    }
    data = hub_dataset(folder / "kd", **subsets)
    return recipe | {"data": {"source": "distillation", "name": str(data)}, "loss": {"name": "distillation"}}


@pytest.mark.parametrize("kind", ["texts", "pages", "distillation"])
def test_no_query_is_both_held_out_and_trained_on(kind, tmp_path):
    file = write(tmp_path, repeated(kind, tmp_path))
    data, again, other = (load_data(load_recipe(file, [f"data.seed={seed}"])) for seed in (0, 0, 1))
    held_out, trained = data.held_out[:]["query"], data.train[:]["query"]
    assert not set(held_out) & set(trained)
    # Four whole queries: of three there are 9 rows.
    assert len(held_out) == 12 and len(set(held_out)) == 4 and len(trained) == 48
    assert held_out == again.held_out[:]["query"] and trained == again.train[:]["query"]
    assert set(held_out) != set(other.held_out[:]["query"])


def test_of_queries_that_stand_in_one_row_each_the_first_rows_are_held_out(tmp_path):
    recipe = load_recipe(write(tmp_path, tiny(tmp_path)))
    rows = Dataset.from_json(recipe.data.files[0]).map(lambda row: {"query": row["positive"]})
    rows.to_json(recipe.data.files[0])
    data, shuffled = load_data(recipe), rows.shuffle(seed=recipe.data.seed)
    assert data.held_out[:] == shuffled[:24] and data.train[:] == shuffled[24:]


def test_docstring_pairs_are_many_uneven_and_the_same_each_time():
    pairs = docstring_pairs(["torch", "numpy", "scipy"], limit=2000, seed=3)
    assert pairs[:200] == docstring_pairs(["torch", "numpy", "scipy"], limit=200, seed=3)
    assert pairs[:20] != docstring_pairs(["torch", "numpy", "scipy"], limit=20, seed=4)
    assert len(pairs) == 2000
    assert len({pair["query"] for pair in pairs}) == len({pair["positive"] for pair in pairs}) == 2000
    for pair in pairs:
        assert pair["query"].lower() not in pair["positive"].lower()
        assert pair["query"] == " ".join(pair["query"].split())
    lengths = [len(pair["positive"].split()) for pair in pairs]
    quarters = statistics.quantiles(lengths, n=4)
    assert min(lengths) >= 12 and quarters[2] > 3 * quarters[0]


def test_a_docstring_is_split_after_its_first_sentence_and_without_its_signature():
    rest = "The rest of it is long enough to be a document, i.e. it has at least a dozen words."
    assert split_docstring(f"\n    take(a, axis=None)\n\n    Take the elements of\n    an array.  {rest}\n") == (
        "Take the elements of an array.",
        rest,
    )
    assert split_docstring(f"Take the elements of an array\n\n{rest}") == ("Take the elements of an array", rest)
    assert split_docstring(f"Take it. {rest}") is None
    assert split_docstring(f"Take the elements of an array. {rest} Take the elements of an array, again.") is None


def test_a_built_model_is_the_same_each_time(tmp_path):
    files = []
    for place in ("a", "b"):
        prepared = prepare(load_recipe(write(tmp_path, tiny(tmp_path, place))))
        assert prepare(load_recipe(write(tmp_path, tiny(tmp_path, place)))) == prepared
        files.append(Path(prepared.model.name_or_path))
    assert [path.name for path in (tmp_path / "a" / "prepared").iterdir()] == [files[0].parent.name]
    for name in ("model.safetensors", "1_Dense/model.safetensors", "tokenizer.json"):
        assert (files[0] / name).read_bytes() == (files[1] / name).read_bytes()
    model = models.ColBERT(str(files[0]), device="cpu")
    assert model.tokenizer.unk_token_id not in model.skiplist
    assert (model.query_length, model.document_length) == (8, 24)


def docstrings(word: str) -> str:
    rest = "The rest is long enough to be a document, for it has more than a dozen words."
    return "".join(f'def f{i}():\n    """{word} number {i} of them all.\n\n    {rest} {i}"""\n' for i in range(40))


@pytest.mark.parametrize("source", ["files", "hub", "docstrings", "mined", "distillation"])
def test_other_rows_under_the_same_name_are_prepared_anew(source, tmp_path, monkeypatch):
    values = tiny(tmp_path, evaluation={"rows": 0})
    place = Path(values["data"]["files"][0])
    content = place.read_text()
    if source == "docstrings":
        place = tmp_path / "documented" / "__init__.py"
        values["data"], content = {"source": source, "packages": ["documented"]}, docstrings("token")
        place.parent.mkdir()
        monkeypatch.syspath_prepend(tmp_path)
    elif source == "hub":
        place = tmp_path / "rows" / "train.jsonl"
        values["data"] = {"source": source, "name": str(place.parent)}
        place.parent.mkdir()
    elif source == "mined":
        data = hub_dataset(tmp_path / "kd", **kd_subsets())
        values |= {"data": {"source": "distillation", "name": str(data)}, "loss": {"name": "distillation"}}
        place, content = data / "mining.json", json.dumps({"digest": "token"})
    elif source == "distillation":
        place = tmp_path / "kd" / "documents.jsonl"
        values |= {"data": {"source": source, "name": str(place.parent)}, "loss": {"name": source}}
        place.parent.mkdir()
        for name, rows in kd_subsets().items():
            content = "".join(json.dumps(row) + "\n" for row in rows)
            place.with_stem(name).write_text(content)
    place.write_text(content)
    recipe = load_recipe(write(tmp_path, values))
    first = prepare(recipe)
    training.train(recipe)
    os.utime(place)
    assert prepare(recipe) == first
    place.write_text(content.replace("token", "other"))
    assert prepare(recipe).model.name_or_path != first.model.name_or_path
    if source == "docstrings":
        with pytest.raises(
            RecipeError, match="data.packages: documented changed after the checkpoints in .* were made; "
        ):
            training.train(recipe)
    place.write_text(content)
    assert prepare(recipe) == first and training.train(recipe)["resumed_from"] == "checkpoint-14"


def test_two_processes_that_prepare_at_once_use_what_the_first_has_made(tmp_path, monkeypatch):
    # On several machines without a common disk, all processes but those of the first do.
    recipe = load_recipe(write(tmp_path, tiny(tmp_path)))
    build, first = preparing.build_model, []

    def overtaken(*args):
        if not first:
            first.append(True)
            first.append(prepare(recipe))
        build(*args)

    monkeypatch.setattr(preparing, "build_model", overtaken)
    assert prepare(recipe) == first[1]
    made = list((tmp_path / "out" / "prepared").iterdir())
    assert len(made) == 1 and not made[0].name.startswith("unfinished")
    models.ColBERT(first[1].model.name_or_path, device="cpu")


def test_checkpoints_of_another_recipe_are_not_continued_and_can_be_given_up(tmp_path):
    file = write(tmp_path, tiny(tmp_path))
    training.train(load_recipe(file))
    changed = load_recipe(file, ["training.learning_rate=0.002", "fast.enabled=true", "training.save_steps=100"])
    with pytest.raises(RecipeError, match="training.learning_rate is 0.002, but the checkpoints in .* with 0.001"):
        training.train(changed)
    result = training.train(changed, resume=False)
    assert result["resumed_from"] is None
    assert [path.name for path in (tmp_path / "out").glob("checkpoint-*")] == ["checkpoint-14"]


def test_a_folder_that_was_moved_is_gone_on_with(tmp_path):
    file = write(tmp_path, tiny(tmp_path))
    training.train(load_recipe(file, ["training.max_steps=8"]), resume=False)
    shutil.move(tmp_path / "out", tmp_path / "moved")
    recipe = load_recipe(file, [f"output_dir={tmp_path}/./moved", "training.max_steps=8"])
    assert training.train(recipe)["resumed_from"] == "checkpoint-8"


def test_a_checkpoint_that_was_cut_short_does_not_count(tmp_path):
    recipe = load_recipe(write(tmp_path, tiny(tmp_path)))
    assert last_checkpoint(recipe) is None
    for step, state in ((4, "{}"), (12, "{}"), (16, ""), (20, '{"epoch": 1.0, "log_hi'), (100, None)):
        directory = tmp_path / "out" / f"checkpoint-{step}"
        directory.mkdir(parents=True)
        if state is not None:
            (directory / "trainer_state.json").write_text(state)
    assert last_checkpoint(recipe).name == "checkpoint-12"


def test_saved_models_are_pylate_models_whose_cards_name_the_recipe(tmp_path):
    result = training.train(load_recipe(write(tmp_path, tiny(tmp_path), name="my-recipe")))
    for folder in (Path(result["model"]), last_checkpoint(load_recipe(tmp_path / "my-recipe.yaml"))):
        model = models.ColBERT(str(folder), device="cpu")
        assert model.encode(["a query"], is_query=True)[0].shape == (8, 8)
        card = (folder / "README.md").read_text()
        assert card.count(f"recipe `my-recipe` of pylate-fastmaxsim {pylate_fastmaxsim.__version__} (PyLate ") == 1
        assert "learning_rate: 0.001" in card and "ColBERT" in card.partition("## Training recipe")[0]
    assert 0 < result["ndcg@10"] <= 1
    assert json.loads((tmp_path / "out" / "train.json").read_text()) == result


LOAD_WITHOUT_US = """
import sys
sys.modules["pylate_fastmaxsim"] = None  # importing it fails
import torch
from pylate.models import ColBERT
model = ColBERT(sys.argv[1], device="cpu")
torch.save([model.encode(["a query"], is_query=True), model.encode(["a document, longer"], is_query=False)], sys.argv[2])
"""


@pytest.mark.parametrize("place", ["model", "checkpoint-4"])
def test_a_trained_model_loads_in_plain_pylate_without_this_package(place, tmp_path):
    training.train(load_recipe(write(tmp_path, tiny(tmp_path)), ["fast.enabled=true", "training.max_steps=4"]))
    folder = tmp_path / "out" / place
    command = [sys.executable, "-c", LOAD_WITHOUT_US, str(folder), str(tmp_path / "encoded")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    model = models.ColBERT(str(folder), device="cpu")
    ours = [model.encode(["a query"], is_query=True), model.encode(["a document, longer"], is_query=False)]
    for (expected,), (got,) in zip(ours, torch.load(tmp_path / "encoded", weights_only=False), strict=True):
        assert got == pytest.approx(expected, abs=1e-6)
    for file in folder.rglob("*.json"):
        assert "fastmaxsim" not in file.read_text(), file


def test_stock_and_fast_training_agree_for_every_loss(tmp_path):
    rows = [
        {"query": text(i, 4), "documents": [text(i + j, 3 + (i * j) % 11) for j in range(3)], "scores": [2.0, 1.0, 0.5]}
        for i in range(16)
    ]
    (tmp_path / "kd.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    cases = {
        "contrastive": ({"temperature": 0.5}, "pairs.jsonl"),
        "cached_contrastive": ({"mini_batch_size": 2}, "pairs.jsonl"),
        "distillation": ({"normalize_scores": False}, "kd.jsonl"),
    }
    for name, (options, file) in cases.items():
        recipe = tiny(tmp_path, name, loss={"name": name, **options}, data={"files": [str(tmp_path / file)]})
        recipe["model"]["build"]["dropout"] = 0.0
        recipe["training"] |= {"max_steps": 3, "save_steps": None}
        recipe["evaluation"]["rows"] = 4
        path = write(tmp_path, recipe)
        stock = training.train(load_recipe(path))
        fast = training.train(load_recipe(path, ["fast.enabled=true", "fast.stock_masking=true"]))
        for (_, expected), (_, got) in zip(stock["losses"], fast["losses"], strict=True):
            assert got == pytest.approx(expected, rel=1e-4), name


def test_data_that_cannot_be_loaded_is_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    recipe = tiny(tmp_path)
    recipe["data"] = {"source": "hub", "name": "no-such-owner/no-such-data"}
    with pytest.raises(RecipeError, match="data.name cannot be loaded: "):
        training.train(load_recipe(write(tmp_path, recipe)))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("source", [{}, {"source": "docstrings", "packages": ["numpy"], "files": None}])
@pytest.mark.parametrize("command", [training.train, compare])
def test_a_model_that_cannot_be_loaded_leaves_nothing_behind(command, source, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    recipe = tiny(tmp_path, data=source)
    recipe["model"] = {"name_or_path": "no-such-owner/no-such-model"}
    with pytest.raises(RecipeError, match="model.name_or_path no-such-owner/no-such-model cannot be loaded: "):
        command(load_recipe(write(tmp_path, recipe)))
    assert not (tmp_path / "out").exists()


def test_two_processes_train_one_model_and_only_the_main_one_writes_it(tmp_path):
    recipe = tiny(tmp_path, training={"max_steps": 4, "save_steps": 2})
    command = ["torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command += ["-m", "pylate_fastmaxsim.cli", "train", str(write(tmp_path, recipe)), "--set", "fast.enabled=true"]
    done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("tiny: trained") == 1
    result = json.loads((tmp_path / "out" / "train.json").read_text())
    assert result["steps"] == 4 and result["ndcg@10"] > 0
    assert asdict(load_recipe(tmp_path / "out" / RECIPE_FILE))["fast"]["enabled"]
    assert len(list((tmp_path / "out" / "checkpoint-4").glob("rng_state_*.pth"))) == 2
    # One process would train on other rows.
    shutil.rmtree(tmp_path / "out" / "checkpoint-4")
    with pytest.raises(RecipeError, match="the number of processes is 1, but the checkpoints in .* were made with 2; "):
        training.train(load_recipe(tmp_path / "tiny.yaml"))
