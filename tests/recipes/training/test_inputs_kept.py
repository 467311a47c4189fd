"""Runs go on only with the data and the model that their checkpoints were made of."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

pytest.importorskip("typer")
pytest.importorskip("pylate")

from test_output_kept import ending_with, without_checkpoints
from tiny_recipe import kd_subsets, tiny, write

from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.files.digest import content_digest
from pylate_fastmaxsim.recipes.load import load_recipe
from pylate_fastmaxsim.recipes.training import fingerprint
from pylate_fastmaxsim.recipes.training import train as training
from pylate_fastmaxsim.recipes.training.prepare import prepare


def test_a_run_does_not_go_on_with_files_that_were_rewritten(tmp_path, monkeypatch):
    file, out, pairs = write(tmp_path, tiny(tmp_path)), tmp_path / "out", tmp_path / "pairs.jsonl"
    recipe = load_recipe(file)
    first = training.train(recipe)
    content = pairs.read_text()
    # Moved or copied anew, with a time of its own and the same rows.
    os.utime(pairs, ns=(0, 0))
    assert training.train(recipe)["resumed_from"] == "checkpoint-14"
    pairs.write_text(content.replace("number 3", "number 4"))
    os.utime(pairs, ns=(0, 0))
    assert len(pairs.read_text()) == len(content)
    with pytest.raises(RecipeError) as error:
        training.train(recipe)
    assert str(error.value) == (
        f"data.files: {pairs} changed after the checkpoints in {out} were made; bring the earlier content back, choose "
        "another output_dir, or start over with --no-resume."
    )
    result = json.loads((out / "train.json").read_text())
    assert result["losses"] == first["losses"] and result["ndcg@10"] == first["ndcg@10"]
    assert training.train(recipe, resume=False)["resumed_from"] is None
    # What has not changed since is not read a second time, and a folder of an earlier version says nothing of it.
    with monkeypatch.context() as patch:
        patch.setattr(fingerprint, "content_digest", None)
        assert training.train(recipe)["resumed_from"] == "checkpoint-14"
    (out / "files.json").unlink()
    pairs.write_text(content)
    assert training.train(recipe)["resumed_from"] == "checkpoint-14"


def inputs_in_folders(kind: str, folder: Path) -> tuple[dict, Path]:
    """A recipe with data or a model in a folder of its own, and the file there whose content decides."""
    values, place = tiny(folder, evaluation={"rows": 0}, training={"max_steps": 4}), folder / "inputs"
    if kind == "hub":
        place.mkdir()
        values["data"] = {"source": "hub", "name": str(place)}
        return values, (folder / "pairs.jsonl").rename(place / "train.jsonl")
    if kind == "distillation":
        values |= {"data": {"source": kind, "name": str(place)}, "loss": {"name": kind}}
        place.mkdir()
        for name, rows in kd_subsets().items():
            (place / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return values, place / "documents.jsonl"
    prepared = prepare(load_recipe(write(folder, values)))
    shutil.copytree(prepared.model.name_or_path, place)
    shutil.rmtree(folder / "out")
    values["model"] = {"name_or_path": str(place), "query_length": 8, "document_length": 24}
    return values, place / "model.safetensors"


@pytest.mark.parametrize("kind", ["hub", "distillation", "model"])
def test_a_run_does_not_go_on_with_a_folder_that_was_rewritten(kind, tmp_path, monkeypatch):
    values, changing = inputs_in_folders(kind, tmp_path)
    recipe, out, place = load_recipe(write(tmp_path, values)), tmp_path / "out", changing.parent
    training.train(recipe)
    content = changing.read_bytes()
    os.utime(changing, ns=(0, 0))
    (place / ".cache").mkdir()
    (place / ".cache" / "downloaded").write_text("what no library reads")
    if kind == "model":
        (place / "README.md").write_text("a card that was written again")
    with monkeypatch.context() as patch:
        read = set()
        patch.setattr(
            fingerprint, "content_digest", lambda key, files: read.update(files) or content_digest(key, files)
        )
        assert training.train(recipe)["resumed_from"] == "checkpoint-4"
    assert read == {changing}  # what has not changed since is not read a second time
    changed = bytearray(content)
    changed[-2 if kind == "model" else content.index(b"token")] ^= 1
    changing.write_bytes(changed)
    with pytest.raises(RecipeError) as error:
        training.train(recipe)
    assert str(error.value) == (
        f"{'model.name_or_path' if kind == 'model' else 'data.name'}: {place} changed after the checkpoints in {out} were "
        "made; bring the earlier content back, choose another output_dir, or start over with --no-resume."
    )
    changing.write_bytes(content)
    extra = shutil.copy(changing, place / f"another-{changing.name}")
    if kind == "distillation":  # whose files are loaded by their names
        assert training.train(recipe)["resumed_from"] == "checkpoint-4"
    else:
        with pytest.raises(RecipeError, match=f"{place} changed after the checkpoints"):
            training.train(recipe)
    extra.unlink()
    # A folder of an earlier version says nothing of it.
    changing.write_bytes(changed)
    (out / "files.json").unlink()
    assert training.train(recipe)["resumed_from"] == "checkpoint-4"


def card(data_files: str) -> str:
    return f"---\nconfigs: [{{config_name: default, data_files: {data_files}}}]\n---\n"


@pytest.mark.parametrize("output", ["out", "inputs"])
def test_of_a_folder_with_a_card_only_what_it_names_may_not_change(output, tmp_path):
    values, named = inputs_in_folders("hub", tmp_path)
    place = named.parent
    (place / "README.md").write_text(card("train.jsonl"))
    recipe = load_recipe(write(tmp_path, values | {"output_dir": str(tmp_path / output)}))
    training.train(recipe)
    (place / "lengths.csv").write_text("query,length\n1,2\n")
    assert training.train(recipe)["resumed_from"] == "checkpoint-4"
    (place / "others.jsonl").write_text(named.read_text().replace("number", "letter"))
    (place / "README.md").write_text(card("others.jsonl"))
    with pytest.raises(RecipeError, match=f"data.name: {place} changed after the checkpoints"):
        training.train(recipe)


@pytest.mark.parametrize("kind", ["hub", "model"])
def test_inputs_inside_of_the_output_folder_may_not_change_either(kind, tmp_path):
    values, changing = inputs_in_folders(kind, tmp_path)
    recipe = load_recipe(write(tmp_path, values | {"output_dir": str(tmp_path)}))
    training.train(recipe)
    changed = bytearray(changing.read_bytes())
    changed[-2 if kind == "model" else changed.index(b"token")] ^= 1
    changing.write_bytes(changed)
    with pytest.raises(RecipeError, match=f"{changing.parent} changed after the checkpoints"):
        training.train(recipe)


def test_a_link_to_another_copy_of_the_data_goes_on(tmp_path):
    values, changing = inputs_in_folders("distillation", tmp_path)
    link = tmp_path / "link"
    link.symlink_to(changing.parent)
    values["data"]["name"] = str(link)
    recipe = load_recipe(write(tmp_path, values))
    training.train(recipe)
    shutil.copytree(changing.parent, tmp_path / "deeper" / "copy")
    link.unlink()
    link.symlink_to(tmp_path / "deeper" / "copy")
    assert training.train(recipe)["resumed_from"] == "checkpoint-4"


def test_the_model_that_a_run_replaces_is_no_change_of_its_model(tmp_path, monkeypatch):
    training.train(load_recipe(without_checkpoints(tmp_path)))
    model = {"name_or_path": str(tmp_path / "out" / "model")}
    recipe = load_recipe(write(tmp_path, tiny(tmp_path, training={"max_steps": 4}) | {"model": model}))
    with monkeypatch.context() as patch:
        patch.setattr(training, "evaluate", ending_with(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            training.train(recipe)
    assert training.train(recipe)["resumed_from"] == "checkpoint-4"


def test_what_a_run_writes_into_the_folder_of_its_data_is_no_change_of_it(tmp_path):
    values, changing = inputs_in_folders("hub", tmp_path)
    (changing.parent / "README.md").write_text(card("train.jsonl"))
    file = write(tmp_path, values | {"output_dir": str(changing.parent / "out")})
    training.train(load_recipe(file))
    training.train(load_recipe(file, [f"output_dir={changing.parent / 'other'}"]))
    (changing.parent / "nohup.out").write_text("a log")
    assert training.train(load_recipe(file))["resumed_from"] == "checkpoint-4"
