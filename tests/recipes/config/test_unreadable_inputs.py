"""Files that may not be read, and paths that cannot be reached, are sentences that name the key."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys

import pytest

pytest.importorskip("datasets")
pytest.importorskip("pylate")

import pyarrow.parquet as pq
import torch
from datasets import Dataset, DatasetDict
from test_shipped_recipes import kd_subsets
from tiny_recipe import hub_dataset, tiny, write

from pylate_fastmaxsim.recipes.config.schema import DataSection, MiningSection, ModelSection
from pylate_fastmaxsim.recipes.data.mined import mined_digest, read_summary, settings_of
from pylate_fastmaxsim.recipes.data.tables import load_table
from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.files.digest import content_digest
from pylate_fastmaxsim.recipes.files.write import write_failure
from pylate_fastmaxsim.recipes.load import load_recipe
from pylate_fastmaxsim.recipes.mining.teacher import load_teacher
from pylate_fastmaxsim.recipes.models import load as models
from pylate_fastmaxsim.recipes.models import text as text_models
from pylate_fastmaxsim.recipes.training.inputs import load_data

LOAD = """
import json, sys
from pylate_fastmaxsim.recipes.load import load_recipe
from pylate_fastmaxsim.recipes.errors import RecipeError
for override in sys.argv[2:]:
    try:
        load_recipe(sys.argv[1], [override])
    except RecipeError as error:
        print(json.dumps(str(error)))
"""


def as_a_user(*arguments: str) -> subprocess.CompletedProcess:
    """Run Python as somebody whom the modes of files concern, which root is not."""
    without_rights = []
    if os.geteuid() == 0:
        if shutil.which("setpriv") is None:
            pytest.skip("root may read everything, and there is no setpriv")
        without_rights = [
            "setpriv",
            *(f"--{each}=-dac_override,-dac_read_search" for each in ("bounding-set", "inh-caps")),
        ]
    return subprocess.run([*without_rights, sys.executable, *arguments], capture_output=True, text=True, timeout=300)


def test_what_a_recipe_names_and_the_system_refuses(tmp_path):
    file, locked = write(tmp_path, tiny(tmp_path)), tmp_path / "locked"
    secret = shutil.copy(tmp_path / "pairs.jsonl", tmp_path / "secret.jsonl")
    (locked / "inside").mkdir(parents=True)
    pairs = f"mining={{teacher: a/b, pairs: {{source: files, files: [{secret}]}}}}"
    sentences = {
        f"data.files=[{secret}]": f"data.files: {secret} cannot be read: Permission denied.",
        pairs: f"mining.pairs.files: {secret} cannot be read: Permission denied.",
        f"data.files=[{locked}/a.jsonl]": f"data.files: {locked}/a.jsonl cannot be reached: Permission denied.",
        f"output_dir={locked}/new": f"output_dir: {locked}/new cannot be reached: Permission denied.",
        f"output_dir={locked}": f"output_dir: {locked} cannot be reached: Permission denied.",
        f"model={{name_or_path: {locked}/inside}}": f"model.name_or_path: {locked}/inside cannot be reached: Permission denied.",
        f"evaluation.beir={locked}": f"evaluation.beir: {locked} cannot be reached: Permission denied.",
    }
    os.chmod(secret, 0)
    locked.chmod(0)
    try:
        done = as_a_user("-c", LOAD, str(file), *sentences)
    finally:
        locked.chmod(0o700)
    assert done.returncode == 0, done.stderr
    assert list(map(json.loads, done.stdout.splitlines())) == list(sentences.values())


@pytest.mark.parametrize("key", ["output_dir", "model.name_or_path", "data.files", "evaluation.beir"])
def test_a_path_that_no_file_system_has(key, tmp_path):
    file = write(tmp_path, tiny(tmp_path))
    for path, sentence in {
        "./" + "x" * 300 + ".jsonl": f"{key}: ./{'x' * 300}.jsonl cannot be reached: File name too long.",
        "a\0b": f"{key} has a character that no path may have, got 'a\\x00b'.",
    }.items():
        value = json.dumps([path] if key == "data.files" else path)
        override = f"model={{name_or_path: {value}}}" if key == "model.name_or_path" else f"{key}={value}"
        with pytest.raises(RecipeError) as error:
            load_recipe(file, [override])
        assert str(error.value) == sentence


@pytest.mark.parametrize("layout", ["hub", "files"])
def test_a_file_of_mined_data(layout, tmp_path):
    values = tiny(tmp_path, evaluation={"rows": 0}, loss={"name": "distillation"})
    values["data"] = {"source": "distillation", "name": str(tmp_path / "kd")}
    hub_dataset(tmp_path / "kd", **kd_subsets())
    secret = tmp_path / "kd" / "documents" / "train-00000-of-00001.parquet"
    if layout == "files":
        (tmp_path / "kd" / "README.md").unlink()
        for name in kd_subsets():
            moved = tmp_path / "kd" / name / "train-00000-of-00001.parquet"
            secret = moved.rename(tmp_path / "kd" / f"{name}.parquet")
    secret.chmod(0)
    done = as_a_user("-m", "pylate_fastmaxsim.cli", "train", str(write(tmp_path, values)))
    assert (done.returncode, done.stderr) == (
        2,
        f"fastmaxsim: data.name: {secret} cannot be read: Permission denied.\n",
    )


@pytest.mark.parametrize(("content", "reason"), [("{", "it is not JSON"), ("[]", "it is not a JSON object")])
def test_a_damaged_summary_of_mined_data(content, reason, tmp_path):
    file = tmp_path / "kd" / "mining.json"
    file.parent.mkdir()
    file.write_text(content)
    with pytest.raises(RecipeError) as error:
        mined_digest(DataSection(source="distillation", name=str(file.parent)))
    assert str(error.value) == (
        f"data.name: {file} cannot be read: {reason}; bring it back, or mine again with --no-resume."
    )


@pytest.mark.parametrize("content", ["{}", '{"settings": null}', '{"settings": {"mining": {}}}'])
def test_a_summary_of_mined_data_without_settings(content, tmp_path):
    file = tmp_path / "mining.json"
    file.write_text(content)
    with pytest.raises(RecipeError) as error:
        settings_of(read_summary(tmp_path), tmp_path)
    assert str(error.value) == (
        f"data.name: {file} cannot be read: it does not say with which settings data were mined; bring it back, or mine "
        "again with --no-resume."
    )


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_file_of_the_model(name, encoder, tmp_path):
    model = shutil.copytree(encoder("modernbert"), tmp_path / "model")
    (model / name).chmod(0)
    values = tiny(tmp_path) | {"model": {"name_or_path": str(model)}}
    done = as_a_user("-m", "pylate_fastmaxsim.cli", "train", str(write(tmp_path, values)))
    sentence = f"model.name_or_path {model} cannot be loaded: {model / name} cannot be read."
    assert (done.returncode, done.stderr) == (2, f"fastmaxsim: {sentence}\n")


@pytest.mark.parametrize("content", [b"", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", None])
@pytest.mark.parametrize("key", ["model.name_or_path", "mining.teacher"])
def test_a_model_whose_weights_are_not_whole(key, content, encoder, tmp_path):
    model = shutil.copytree(encoder("modernbert"), tmp_path / "model")
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:5000] if content is None else content)
    with pytest.raises(RecipeError) as error:
        if key == "model.name_or_path":
            models.load_model(ModelSection(name_or_path=str(model)), "cpu", seed=0)
        else:
            load_teacher(MiningSection(pairs=DataSection("hub"), teacher=str(model)), torch.device("cpu"))
    assert str(error.value) == (
        f"{key} {model} cannot be loaded: {file} is not whole, as after a download that was cut short or a clone without "
        "Git LFS."
    )


@pytest.mark.parametrize(
    ("key", "override", "what"),
    [
        ("model.name_or_path", "model={name_or_path: FILE}", "a model"),
        ("data.name", "data={source: hub, name: FILE}", "data"),
        ("evaluation.beir", "evaluation={beir: FILE}", "a collection"),
        ("mining.teacher", "mining={teacher: FILE, pairs: {source: hub, name: a/b}}", "a model"),
        ("mining.pairs.name", "mining={teacher: a/b, pairs: {source: hub, name: FILE}}", "data"),
    ],
)
def test_a_file_where_a_name_on_the_hub_is_meant(key, override, what, tmp_path, monkeypatch):
    recipe = write(tmp_path, tiny(tmp_path))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecipeError) as error:
        load_recipe(recipe, [override.replace("FILE", "pairs.jsonl")])
    assert str(error.value) == f"{key} must be {what} on the Hub or a directory, but pairs.jsonl is a file."


@pytest.mark.parametrize("others", [{"query": "q", "positive": "d", "answer": "a"}, {"query": "q", "answer": "a"}])
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_files_with_other_columns_than_the_first(suffix, others, tmp_path):
    files = []
    (tmp_path / "tables").mkdir()
    for name, row in {"train-0": {"query": "q", "positive": "d"}, "train-1": others}.items():
        files.append(str(tmp_path / "tables" / f"{name}.{suffix}"))
        rows = Dataset.from_list([row] * 9)
        rows.to_json(files[-1]) if suffix == "jsonl" else rows.to_parquet(files[-1])
    if suffix == "jsonl":
        (tmp_path / "tables" / "train-0-empty.jsonl").touch()
    with pytest.raises(RecipeError) as error:
        load_data(load_recipe(write(tmp_path, tiny(tmp_path, data={"files": files}))))
    assert str(error.value) == (
        f"data.files: all rows must have the columns of the first (query, positive), but {files[1]} has answer."
    )
    with pytest.raises(RecipeError) as error:
        load_table("data.name", str(tmp_path / "tables"), split="train")
    assert str(error.value) == (
        f"data.name: all rows must have the columns of the first (query, positive), but {files[1]} has answer."
    )


@pytest.mark.parametrize("source", ["hub", "distillation"])
@pytest.mark.parametrize("saved", [Dataset, DatasetDict])
def test_a_folder_written_by_save_to_disk(saved, source, tmp_path):
    rows = Dataset.from_list([{"query": f"query {row}", "positive": f"document {row}"} for row in range(9)])
    (rows if saved is Dataset else DatasetDict(train=rows)).save_to_disk(tmp_path / "saved")
    values = tiny(tmp_path, loss={"name": "distillation" if source == "distillation" else "contrastive"})
    values["data"] = {"source": source, "name": str(tmp_path / "saved")}
    with pytest.raises(RecipeError) as error:
        load_data(load_recipe(write(tmp_path, values)))
    assert str(error.value) == (
        f"data.name: the folder {tmp_path}/saved was written by save_to_disk of datasets, which is not read here; load it "
        "with load_from_disk and write each table with to_parquet."
    )


def test_a_folder_that_datasets_takes_for_a_pattern(tmp_path):
    folder = tmp_path / "runs [1]"
    folder.mkdir()
    Dataset.from_list([{"query": f"query {row}", "positive": "a"} for row in range(9)]).to_csv(folder / "rows.csv")
    values = tiny(tmp_path)
    values["data"] = {"source": "hub", "name": str(folder)}
    with pytest.raises(RecipeError) as error:
        load_data(load_recipe(write(tmp_path, values)))
    assert str(error.value) == (
        f"data.name: the path of the folder {folder} must have no [, which datasets takes for the begin of a pattern; "
        "rename it."
    )


def test_parquet_files_without_rows(tmp_path):
    files = [str(tmp_path / f"{name}.parquet") for name in ("rows", "empty")]
    rows = Dataset.from_list([{"query": "q", "positive": "d"}])
    rows.to_parquet(files[0])
    pq.write_table(rows.data.table.slice(0, 0), files[1])  # a group of no rows, where datasets writes no group
    for some in (files, files[1:]):
        with pytest.raises(RecipeError) as error:
            load_table("data.files", "parquet", data_files=some, split="train")
        assert str(error.value) == f"data.files: there are no rows in {files[1]}."


def test_tables_called_as_datasets_calls_its_own(tmp_path):
    for name in ("city", "state"):
        (tmp_path / f"{name}.json").write_text('{"query": "q", "positive": "d"}\n')
    assert len(load_table("data.name", str(tmp_path), split="train")) == 2


@pytest.mark.parametrize("kind", ["json", "parquet"])
def test_a_folder_with_the_name_of_a_kind_of_files(kind, tmp_path, monkeypatch):
    rows = [{"query": f"query {row}", "positive": f"document {row}"} for row in range(9)]
    suffix = "jsonl" if kind == "json" else kind
    for name, some in (("rows", rows), (f"{kind}/others", rows[:5])):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        table = Dataset.from_list(some)
        (table.to_json if kind == "json" else table.to_parquet)(str(tmp_path / f"{name}.{suffix}"))
    monkeypatch.chdir(tmp_path)
    table = load_table("data.files", kind, data_files=[f"rows.{suffix}"], split="train")
    assert table["query"][:] == [row["query"] for row in rows]


def test_a_folder_with_a_description_that_datasets_wrote(tmp_path):
    folder = tmp_path / "rows"
    folder.mkdir()
    Dataset.from_list([{"query": "q", "positive": "d"}]).to_parquet(folder / "train.parquet")
    (folder / "dataset_info.json").write_text("{}")
    assert len(load_table("data.name", str(folder), split="train")) == 1


def test_an_input_that_goes_while_it_is_read_names_its_key(tmp_path):
    gone = tmp_path / "gone.jsonl"
    with pytest.raises(RecipeError) as error:
        content_digest("data.files", [gone])
    assert str(error.value) == f"data.files: {gone} cannot be read: No such file or directory."


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.EIO, errno.ENOSPC, errno.EROFS])
def test_what_may_be_said_of_reading_is_not_called_writing(number):
    what = "written" if number in (errno.ENOSPC, errno.EROFS) else "read or written"
    assert write_failure(OSError(number, "", "rows")) == f"rows cannot be {what}: {os.strerror(number)}"


def test_an_error_that_says_nothing_is_named(tmp_path, monkeypatch):
    def silent(*args):
        raise TimeoutError

    monkeypatch.setattr(text_models, "new_colbert", silent)
    monkeypatch.setattr(models, "lacks_tokenizer", lambda section: False)
    with pytest.raises(RecipeError) as error:
        models.load_model(ModelSection(name_or_path="some/model"), "cpu", 0)
    assert str(error.value) == "model.name_or_path some/model cannot be loaded: TimeoutError"
