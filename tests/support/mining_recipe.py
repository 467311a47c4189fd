"""A recipe small enough to be mined by a test, and what mining has computed."""

from pathlib import Path

import pytest

from pylate_fastmaxsim.recipes.config.schema import Recipe
from pylate_fastmaxsim.recipes.load import dump_recipe, load_recipe
from pylate_fastmaxsim.recipes.mining import mine as mining_mine
from pylate_fastmaxsim.recipes.mining import resumable
from tests.support.paths import RECIPES
from tests.support.recipe_kinds import LATE
from tests.support.tiny_recipe import few_steps, hub_dataset, text

RECIPE = RECIPES / "colbert_kd_mine.yaml"
TABLES = ("train", "queries", "documents")


def answers(word: str = "") -> list[str]:
    return [f"{word}{text(i, 2 + i % 20)} {i}" for i in range(40)]


def write_pairs(folder: Path, answers: list[str]) -> Path:
    """Pairs in the layout of the Hub: every fourth query has two positives, and one pair stands there twice."""
    rows = [{"query": text(i - i % 4 // 3, 5), "answer": each} for i, each in enumerate(answers)]
    return hub_dataset(folder, pair=[*rows, rows[0]])


def recipe_for(tmp_path: Path, model: str, teacher: str, *overrides: str) -> Recipe:
    data = tmp_path / "pairs"
    if not data.exists():
        write_pairs(data, answers())
    mining = {"pairs.name": data, "teacher": teacher, "num_negatives": 3, "range_min": 1, "range_max": 12}
    mining |= {"relative_margin": "null", "batch_size": 4, "documents_per_part": 15, "rows_per_part": 9}
    options = [f"model.name_or_path={model}", f"data.name={tmp_path / 'mined'}", "evaluation.rows=8"]
    options += [f"mining.{key}={value}" for key, value in mining.items()]
    if LATE == "multi_vector":
        options += ["model.kind=multi_vector", "loss={name: distillation}", "fast={enabled: true}"]
    return load_recipe(RECIPE, few_steps(tmp_path / "out", *options, *overrides))


def written_to(folder: Path, recipe: Recipe) -> Path:
    file = folder / "mine.yaml"
    file.write_text(dump_recipe(recipe))
    return file


def mine_but_stop(recipe: Recipe, stage: str, after: int, monkeypatch, resume: bool = True) -> list[str]:
    """Mine until so many parts of a stage are written; their names."""
    write, seen = resumable.replace_file, []

    def interrupting(file, writer):
        if file.name.startswith(stage):
            if len(seen) == after:
                raise KeyboardInterrupt
            seen.append(file.name)
        write(file, writer)

    with monkeypatch.context() as patch:
        patch.setattr(resumable, "replace_file", interrupting)
        with pytest.raises(KeyboardInterrupt):
            mining_mine.mine(recipe, resume)
    return seen


def parts_written(recipe: Recipe, monkeypatch) -> list[str]:
    """Mine; the stages of the parts that are computed."""
    write, written = resumable.replace_file, []
    with monkeypatch.context() as patch:
        patch.setattr(resumable, "replace_file", lambda file, writer: (written.append(file.name), write(file, writer)))
        mining_mine.mine(recipe)
    return [name.partition("-")[0] for name in written if not name.startswith("settings")]


def same_data(*folders: Path) -> bool:
    """Whether the tables in folders of mined data have the same bytes."""
    return all(len({(folder / f"{name}.parquet").read_bytes() for folder in folders}) == 1 for name in TABLES)
