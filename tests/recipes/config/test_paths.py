"""Paths of a recipe that the system refuses, or that are files where a name on the Hub is meant."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest

pytest.importorskip("datasets")
pytest.importorskip("pylate")

from tiny_recipe import tiny, write

from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.load import load_recipe

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
    """Run Python as a user whom the modes of files concern, which root is not."""
    without_rights = []
    if os.geteuid() == 0:
        if shutil.which("setpriv") is None:
            pytest.skip("root may read everything, and there is no setpriv")
        without_rights = [
            "setpriv",
            *(f"--{each}=-dac_override,-dac_read_search" for each in ("bounding-set", "inh-caps")),
        ]
    return subprocess.run([*without_rights, sys.executable, *arguments], capture_output=True, text=True, timeout=300)


@pytest.mark.process
def test_paths_without_permission(tmp_path):
    file, locked = write(tmp_path, tiny(tmp_path)), tmp_path / "locked"
    locked.mkdir()
    sentence = f"{file}: {locked}/new cannot be reached: Permission denied."
    sentences = {f"output_dir={locked}/new": sentence, f"evaluation={{beir: {locked}/new}}": sentence}
    locked.chmod(0)
    try:
        done = as_a_user("-c", LOAD, str(file), *sentences)
    finally:
        locked.chmod(0o700)
    assert done.returncode == 0, done.stderr
    assert list(map(json.loads, done.stdout.splitlines())) == list(sentences.values())


def test_files_where_folders_are_meant(tmp_path, monkeypatch):
    recipe, file = write(tmp_path, tiny(tmp_path)), "pairs.jsonl"
    monkeypatch.chdir(tmp_path)
    sentences = {
        f"model={{name_or_path: {file}}}": "model.name_or_path must be a model on the Hub or a directory",
        f"data={{source: hub, name: {file}}}": "data.name must be data on the Hub or a directory",
        f"evaluation={{beir: {file}}}": "evaluation.beir must be a collection on the Hub or a directory",
        f"mining={{teacher: {file}, pairs: {{source: hub, name: a/b}}}}": (
            "mining.teacher must be a model on the Hub or a directory"
        ),
        f"output_dir={file}/below": "output_dir must be a directory or a path yet to be made",
    }
    for override, sentence in sentences.items():
        with pytest.raises(RecipeError) as error:
            load_recipe(recipe, [override])
        assert str(error.value).startswith(f"{sentence}, but ") and str(error.value).endswith(f"{file} is a file.")
