"""What tells files from others of the same names."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.files.records import RECIPE_FILE


def content_digest(key: str, files: Iterable[str | Path]) -> str:
    """Of the content of files, one after the other; read in parts, because models and data are large.

    Raises
    ------
    RecipeError
        A file cannot be read; it names the recipe's ``key``.
    """
    digest = hashlib.sha256()
    for file in files:
        try:
            with open(file, "rb") as content:
                while block := content.read(2**24):
                    digest.update(block)
        except OSError as error:
            raise RecipeError(f"{key}: {file} cannot be read: {error.strerror or error}.") from error
    return digest.hexdigest()


def model_files(folder: Path) -> list[Path]:
    """Of a model in a folder all but its card, what is hidden, as by git and the Hub's client, and folders of runs."""
    runs = {record.parent for record in folder.rglob(RECIPE_FILE)} - {folder}
    inside = {file: file.relative_to(folder).parts for file in sorted(folder.rglob("*")) if file.is_file()}
    return [
        file
        for file, parts in inside.items()
        if file.name != "README.md"
        and not any(part.startswith(".") for part in parts)
        and runs.isdisjoint(file.parents)
    ]
