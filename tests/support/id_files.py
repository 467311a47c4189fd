"""Rows of ids in files, beside the files of a collection and its queries."""

import gzip
import json
from pathlib import Path

from datasets import Dataset

from pylate_fastmaxsim.recipes.data.rows import load_rows
from pylate_fastmaxsim.recipes.load import load_recipe
from pylate_fastmaxsim.recipes.models.load import kind_of
from tests.support.recipe_kinds import LATE, tiny_of
from tests.support.tiny_recipe import text, write


def write_lines(file: Path, lines: list[str]) -> str:
    content = "".join(f"{line}\n" for line in lines)
    with gzip.open(file, "wt") if file.suffix == ".gz" else open(file, "w") as stream:
        stream.write(content)
    return str(file)


def write_collection(folder: Path, queries: str = "queries.tsv", collection: str = "collection.tsv") -> dict[str, str]:
    """The files of a collection and its queries by the keys of a recipe, with ids that are not row numbers."""
    folder.mkdir(parents=True, exist_ok=True)
    if queries.endswith(".tsv"):
        write_lines(folder / queries, [f"{100 - n}\tquery {n}" for n in range(12)])
        write_lines(folder / collection, [f"{500 - n}\t{text(n, 9)} {n}\ttitle {n}" for n in range(30)])
    else:
        Dataset.from_list([{"_id": 100 - n, "text": f"query {n}"} for n in range(12)]).to_parquet(folder / queries)
        rows = [{"_id": str(500 - n), "title": f"title {n}", "text": f"{text(n, 9)} {n}"} for n in range(30)]
        write_lines(folder / collection, list(map(json.dumps, rows)))
    return {"queries": str(folder / queries), "collection": str(folder / collection)}


def document(number: int) -> str:
    """The text of document ``500 - number``."""
    return f"title {number} {text(number, 9)} {number}"


def rows_of_ids(folder: Path, name: str, lines: list[str], *overrides: str, loss: str = "contrastive", **files):
    """The rows of a file with the texts of a collection, or of other ``files``."""
    section = {"source": "files", "files": [write_lines(folder / name, lines)], **write_collection(folder), **files}
    recipe = tiny_of(LATE, folder, loss={"name": loss}, evaluation={"rows": 0}) | {"data": section}
    loaded = load_recipe(write(folder, recipe), overrides)
    return load_rows(loaded, kind_of(loaded.model))
