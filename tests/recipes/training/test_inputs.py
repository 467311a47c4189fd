"""The rows that are trained on and those that are held out, and recipes that do not fit their rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from datasets import Dataset

from pylate_fastmaxsim.precompile.recipe import batch_sizes
from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.load import load_recipe
from pylate_fastmaxsim.recipes.training import inputs as preparing
from pylate_fastmaxsim.recipes.training import train as training
from pylate_fastmaxsim.recipes.training.inputs import load_data, prepare
from tests.support.tiny_recipe import hub_dataset, tiny, write


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("data.columns=[query, negative]", "data.columns: no column 'negative', the data has "),
        ("data.columns=[positive, query]", "data.columns: PyLate's collator encodes 'query' as queries"),
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
    assert batch_sizes(62, load_recipe(file)) == [4]
    recipe = load_recipe(file, ["training.dataloader_drop_last=false"])
    assert (batch_sizes(60, recipe), batch_sizes(62, recipe)) == ([4], [4, 2])


def test_a_model_that_cannot_be_loaded_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    recipe = tiny(tmp_path, data={"source": "docstrings", "packages": ["numpy"], "files": None})
    recipe["model"] = {"name_or_path": "no-such-owner/no-such-model"}
    with pytest.raises(RecipeError, match="model.name_or_path no-such-owner/no-such-model cannot be loaded: "):
        training.train(load_recipe(write(tmp_path, recipe)))
    assert not (tmp_path / "out").exists()


def repeated(kind: str, folder: Path) -> dict:
    """A recipe whose 20 queries stand in three rows each, with another document in each."""
    rows = [{"query": f"query {i % 20}", "positive": f"document {i} of query {i % 20}"} for i in range(60)]
    recipe = tiny(folder, evaluation={"rows": 10})
    if kind == "texts":
        (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return recipe
    # A query may also have several ids.
    subsets = {
        "train": [{"query_id": i, "document_ids": [i, (i + 1) % 60], "scores": [1.0, 0.0]} for i in range(60)],
        "queries": [{"query_id": i, "text": row["query"]} for i, row in enumerate(rows)],
        "documents": [{"document_id": i, "text": row["positive"]} for i, row in enumerate(rows)],
    }
    data = hub_dataset(folder / "kd", **subsets)
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


def test_of_queries_that_stand_in_one_row_each_the_first_rows_are_held_out(tmp_path):
    recipe = load_recipe(write(tmp_path, tiny(tmp_path)))
    rows = Dataset.from_json(recipe.data.files[0]).map(lambda row: {"query": row["positive"]})
    rows.to_json(recipe.data.files[0])
    data, shuffled = load_data(recipe), rows.shuffle(seed=recipe.data.seed)
    assert data.held_out[:] == shuffled[:24] and data.train[:] == shuffled[24:]


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
