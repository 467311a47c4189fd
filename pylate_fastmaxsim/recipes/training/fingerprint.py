"""What tells the data and the model of a recipe from others of the same names: digests of their files."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from pylate_fastmaxsim.recipes.config.schema import SOURCE_KEYS, DataSection, Recipe
from pylate_fastmaxsim.recipes.data.distillation import COLUMNS
from pylate_fastmaxsim.recipes.data.docstrings import source_files
from pylate_fastmaxsim.recipes.data.tables import subset_files, table_files
from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.files.digest import content_digest, model_files
from pylate_fastmaxsim.recipes.files.records import FILES_FILE, read_record

MODEL_DIRECTORY = "model"  # in the folder of a run, what it trained

MODEL_KEY = "model.name_or_path"


def data_contents(recipe: Recipe) -> dict[str, dict[str, Any]]:
    """What tells each of ``data.files`` or ``data.packages``, or the folder ``data.name``, from another of its name.

    A file with the size and times that it had when ``output_dir`` was last written is not read again. Data on the Hub
    has no digest.
    """
    data = recipe.data
    if data.source == "docstrings":
        return {name: {"digest": content_digest("data.packages", source_files(name))} for name in data.packages}
    names = data.files
    if data.source != "files":
        names = [data.name] if Path(data.name).is_dir() else []
    return _contents(recipe, data_key(recipe), names, partial(_data_files, data))


def data_key(recipe: Recipe) -> str:
    """The key that names the data."""
    return f"data.{SOURCE_KEYS[recipe.data.source][0]}"


def model_contents(recipe: Recipe) -> dict[str, dict[str, Any]]:
    """The same of a model in a folder, which may have been trained again since; nothing of one on the Hub.

    Nor of the model that this run replaces when it ends.
    """
    name = recipe.model.name_or_path
    is_kept = name is not None and Path(name).resolve() != Path(recipe.output_dir, MODEL_DIRECTORY).resolve()
    names = [name] if is_kept and Path(name).is_dir() else []
    return _contents(recipe, MODEL_KEY, names, partial(_model_files, Path(recipe.output_dir).resolve()))


def _contents(
    recipe: Recipe, key: str, names: list[str], files_in: Callable[[Path], Iterable[str | Path]]
) -> dict[str, dict[str, Any]]:
    try:
        earlier = read_record(Path(recipe.output_dir, FILES_FILE))
    except RecipeError:
        earlier = {}  # which saves time only
    contents = {}
    for name in names:
        known, path = earlier.get(name, {}), Path(name)
        if path.is_dir():
            path = path.resolve()
            contents[name] = _folder_content(key, path, files_in(path), known)
        else:
            contents[name] = _file_content(key, path, known)
    return contents


def _data_files(data: DataSection, folder: Path) -> list[str]:
    """The files that are loaded of the folder ``data.name``; none where loading fails, which says why itself."""
    name, split = str(folder), data.split or "train"
    with suppress(Exception):
        if data.source == "hub":
            return table_files(name, data.config, split)
        return [file for subset in sorted(COLUMNS) for file in subset_files(name, subset, split)]
    return []


def _model_files(output: Path, folder: Path) -> list[Path]:
    """The files in the folder of a model, and none in this run's inside of it, which may have no record yet."""
    return [file for file in model_files(folder) if folder not in output.parents or output not in file.parents]


def _folder_content(key: str, folder: Path, files: Iterable[str | Path], known: dict[str, Any]) -> dict[str, Any]:
    known, contents = known.get("files", {}), {}
    for file in filter(os.path.isfile, files):
        name = os.path.relpath(file, folder)
        contents[name] = _file_content(key, Path(file), known.get(name, {}))
    digests = {name: content["digest"] for name, content in contents.items()}
    return {"files": contents, "digest": hashlib.sha256(json.dumps(digests).encode()).hexdigest()}


def _file_content(key: str, file: Path, known: dict[str, Any]) -> dict[str, Any]:
    status = os.stat(file)
    # The third because the second may be kept, or be the same for all files, and the first is often the same.
    kept = {"size": status.st_size, "modified": status.st_mtime_ns, "changed": status.st_ctime_ns}
    same = all(known.get(name) == value for name, value in kept.items())
    # The content decides: a copy that is made anew for each job has another time and the same rows.
    return kept | {"digest": known["digest"] if same else content_digest(key, [file])}
