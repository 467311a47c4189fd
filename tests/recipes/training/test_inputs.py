from dataclasses import replace
from pathlib import Path

import pytest
from transformers.trainer import TRAINER_STATE_NAME

from pylate_fastmaxsim.precompile.recipe import batch_sizes
from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.load import load_recipe
from pylate_fastmaxsim.recipes.training import arguments
from pylate_fastmaxsim.recipes.training import inputs as preparing
from pylate_fastmaxsim.recipes.training import train as training
from pylate_fastmaxsim.recipes.training.inputs import load_data, prepare
from tests.support.case_tables import case_table
from tests.support.power_cut import content, states
from tests.support.tiny_recipe import hub_dataset, json_lines, tiny, write


@case_table("""
override | sentence
data.columns=[query, negative] | data.columns: no column 'negative', the data has
data.columns=[positive, query] | data.columns: PyLate's collator encodes 'query' as queries
evaluation.rows=60 | evaluation.rows must leave at least one training batch, but the data has 60 rows
loss.name=distillation | data.columns must be [query, documents, scores] for distillation
model.config_kwargs={num_hidden_layers: 3} | model cannot be built: list index out of range
model.build.intermediate_size=99999999999999999999 | model cannot be built:
model.query_length=100000 | model.query_length must be at most 8192, as many positions as ModernBertModel
model={name_or_path: no-such-owner/no-such-model} | no-such-owner/no-such-model cannot be loaded:
data={source: hub, name: no-such-owner/no-such-data} | data.name cannot be loaded:
evaluation={rows: 0, nano_beir: [nq]} | evaluation.nano_beir cannot be loaded:
training.report_to=wandb | training.report_to must be auto or none here, because wandb is not installed.
training.report_to=wandbb | training.report_to wandbb is not known to transformers; did you mean 'wandb'?
training.optim=adamv | training: adamv is not a valid
training.optim=adamw_8bit | training.optim adamw_8bit cannot be used here: You need to install
training.lr_scheduler_type=cosine_with_min_lr | training.lr_scheduler_type cosine_with_min_lr cannot be used
training.lr_scheduler_type=reduce_lr_on_plateau | training.eval_strategy must be steps or epoch with training.lr_s
""")
def test_a_recipe_that_does_not_fit_leaves_nothing_behind(override, sentence, tmp_path, monkeypatch):
    for library in ("huggingface_hub.constants", "datasets.config"):
        monkeypatch.setattr(f"{library}.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr("transformers.trainer_optimizer.is_bitsandbytes_available", lambda: False)
    monkeypatch.setattr(arguments, "REPORTERS", dict.fromkeys(arguments.REPORTERS, lambda: False))
    with pytest.raises(RecipeError) as error:
        training.train(load_recipe(write(tmp_path, tiny(tmp_path, "runs/out")), [override]))
    assert sentence in str(error.value) and "\n" not in str(error.value)
    assert not (tmp_path / "runs").exists()


def test_too_few_rows_for_a_batch_name_its_size(tmp_path, caplog):
    few = ["evaluation.rows=0", "data.max_rows=3"]
    file = write(tmp_path, tiny(tmp_path, training={"max_steps": 1, "save_steps": None}))
    with pytest.raises(RecipeError, match="^training.per_device_train_batch_size must be at most 3, as many rows as "):
        load_data(load_recipe(file, few))
    # One that is not full is a batch as well.
    recipe = load_recipe(file, [*few, "training.dataloader_drop_last=false"])
    assert training.train(recipe)["steps"] == 1
    assert "The data has 3 rows to train on, fewer than training.per_device_train_batch_size of 4: every" in caplog.text
    assert batch_sizes(3, recipe) == [3]
    assert batch_sizes(62, load_recipe(file)) == [4]
    recipe = load_recipe(file, ["training.dataloader_drop_last=false"])
    assert (batch_sizes(60, recipe), batch_sizes(62, recipe)) == ([4], [4, 2])


def repeated(kind: str, folder: Path) -> dict:
    """A recipe whose 20 queries stand in three rows each, with another document in each."""
    rows = [{"query": f"query {i % 20}", "positive": f"document {i} of query {i % 20}"} for i in range(60)]
    recipe = tiny(folder, evaluation={"rows": 10})
    if kind == "texts":
        json_lines(folder / "pairs.jsonl", rows)
        return recipe
    # A query may also have several ids.
    train = [{"query_id": i, "document_ids": [i, (i + 1) % 60], "scores": [1.0, 0.0]} for i in range(60)]
    queries = [{"query_id": i, "text": row["query"]} for i, row in enumerate(rows)]
    documents = [{"document_id": i, "text": row["positive"]} for i, row in enumerate(rows)]
    data = hub_dataset(folder / "kd", train=train, queries=queries, documents=documents)
    return recipe | {"data": {"source": "distillation", "name": str(data)}, "loss": {"name": "distillation"}}


@pytest.mark.parametrize("kind", ["texts", "distillation"])
def test_no_query_is_both_held_out_and_trained_on(kind, tmp_path):
    file = write(tmp_path, repeated(kind, tmp_path))
    data, again, other = (load_data(load_recipe(file, [f"data.seed={seed}"])) for seed in (0, 0, 1))
    held_out, trained = data.held_out[:]["query"], data.train[:]["query"]
    assert not set(held_out) & set(trained)
    # Four whole queries: of three there are 9 rows.
    assert len(held_out) == 12 and len(set(held_out)) == 4 and len(trained) == 48
    assert held_out == again.held_out[:]["query"] and trained == again.train[:]["query"]
    assert set(held_out) != set(other.held_out[:]["query"])


def test_data_sets_are_mixed_and_validation_rows_are_their_own(tmp_path, caplog):
    def rows(name: str, count: int, positive: str = "d") -> str:
        lines = [{"question": f"{name} {i}", "answer": f"{positive} {i}" if positive else " "} for i in range(count)]
        return json_lines(tmp_path / f"{name}.jsonl", lines)

    more = [{"source": "files", "files": [rows("more", 40, "")], "max_rows": 10}]
    evaluation = {"rows": 0, "data": {"source": "files", "files": [rows("dev", 5)]}}
    file = write(tmp_path, tiny(tmp_path, data={"more": more}, evaluation=evaluation))
    data = load_data(load_recipe(file))
    assert sorted(text.startswith("more") for text in data.train["query"]) == [False] * 60 + [True] * 10
    assert data.train.column_names == ["query", "positive"] and len(set(data.held_out["query"])) == 5
    assert any(text.startswith("more") for text in data.train["query"][:60])
    assert "rows with an empty query or document" in caplog.text and data.empty
    triplets = json_lines(tmp_path / "t.jsonl", [{"query": "q", "positive": "p", "negative": "n"}] * 4)
    section = f"source: files, files: [{triplets}], columns"
    for override, said in (
        (f"data.more=[{{{section}: [query, positive, negative]}}]", r"^data.more\[0\] must have columns as data has"),
        (f"evaluation.data={{{section}: [query, zzz]}}", "no column"),
    ):
        with pytest.raises(RecipeError, match=said):
            load_data(load_recipe(file, [override]))


@pytest.fixture
def documented(tmp_path, monkeypatch):
    """``documented(word)``: write a package whose docstrings have this word. And a recipe of them."""
    package = tmp_path / "documented"
    package.mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    rest = "The rest is long enough to be a document, for it has more than a dozen words."

    def write_package(word: str) -> None:
        code = (f'def f{i}():\n    """One number {i} {word}.\n\n    {rest} {i}"""\n' for i in range(40))
        (package / "__init__.py").write_text("".join(code))

    values = tiny(tmp_path, evaluation={"rows": 0}) | {"data": {"source": "docstrings", "packages": ["documented"]}}
    return write_package, load_recipe(write(tmp_path, values))


def test_rows_and_model_are_made_once_and_again_when_a_run_starts_over(documented, tmp_path):
    write_package, recipe = documented

    def prepared(word: str, anew: bool) -> list[bytes]:
        write_package(word)
        made = prepare(recipe, anew)
        return [Path(file).read_bytes() for file in (*made.data.files, f"{made.model.name_or_path}/tokenizer.json")]

    first = prepared("of all", False)
    assert prepared("of them", False) == first
    other = prepared("of them", True)
    assert other[0] != first[0] and other[1] != first[1]
    assert prepared("of all", True) == first
    assert prepare(replace(recipe, data=replace(recipe.data, max_rows=30))).data.files != prepare(recipe).data.files


def test_kills_and_power_cuts_leave_checkpoints_with_what_they_need(documented, tmp_path):
    (write_package, recipe), out = documented, tmp_path / "out"

    write_package("of all")
    made = Path(prepare(recipe).data.files[0]).parent
    old, state_file = content(made), out / "checkpoint-4" / TRAINER_STATE_NAME
    state_file.parent.mkdir()
    state_file.write_text("{}")
    write_package("of them")
    found = states(out, lambda: prepare(recipe, anew=True), cuts=5)
    new = content(made)
    assert new != old and not state_file.parent.exists()
    for _, state in found:
        folder = f"{made.relative_to(out)}/"
        held = {name.removeprefix(folder): each for name, each in state.items() if name.startswith(folder)}
        assert held == old or (held == new and str(state_file.relative_to(out)) not in state)


def test_two_processes_that_prepare_at_once_use_what_the_first_has_made(tmp_path, monkeypatch):
    # On several machines without a common disk, all processes but those of the first do.
    recipe = load_recipe(write(tmp_path, tiny(tmp_path)))
    build, first = preparing.build_model, []

    def overtaken(*args):
        monkeypatch.undo()
        first.append(prepare(recipe))
        build(*args)

    monkeypatch.setattr(preparing, "build_model", overtaken)
    assert [prepare(recipe)] == first
    made = list((tmp_path / "out" / "prepared").iterdir())
    assert len(made) == 1 and not made[0].name.startswith("unfinished")
