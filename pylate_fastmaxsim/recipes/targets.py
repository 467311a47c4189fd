"""The models that the command line names, and the collection on which they are evaluated."""

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset

from pylate_fastmaxsim.pooling import Max, Pooling
from pylate_fastmaxsim.recipes.config.schema import EvaluationSection, Recipe
from pylate_fastmaxsim.recipes.data.collection import Collection, load_collection, load_files_of_collection
from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.evaluation.evaluate import collection_of
from pylate_fastmaxsim.recipes.load import is_recipe, load_recipe
from pylate_fastmaxsim.recipes.models.load import HostModel, load_retriever, load_trained, saved_class
from pylate_fastmaxsim.recipes.pooling import final_pooling
from pylate_fastmaxsim.recipes.training.inputs import load_data, prepare
from pylate_fastmaxsim.recipes.training.run_directory import MODEL_DIRECTORY


@dataclass(frozen=True)
class Target:
    """A model to evaluate."""

    label: str  # in tables and files
    path: str  # its folder or its name on the Hub
    recipe: Recipe | None = None  # that trained it, if the command line names a recipe
    dense: bool = False  # whether a static model is ranked by one vector a text
    pool_factor: float = 1  # tokens of a document a vector

    @property
    def pooling(self) -> Pooling:
        """The pooling of its scores."""
        return Max() if self.recipe is None else final_pooling(self.recipe.loss.pooling)

    @property
    def visual(self) -> bool:
        """Tell whether it retrieves pages."""
        return self.recipe is not None and self.recipe.model.visual

    @property
    def batch_size(self) -> int:
        """Texts or pages that are encoded at once."""
        return (EvaluationSection() if self.recipe is None else self.recipe.evaluation).batch_size

    def load(self, device: torch.device, trust_remote_code: bool) -> HostModel:
        """The model. RecipeError if it cannot be loaded."""
        if self.visual:  # whose adapters do not say of what
            return load_trained(self.recipe.model, Path(self.path), device)
        trusted = trust_remote_code or (self.recipe is not None and self.recipe.model.trust_remote_code)
        return load_retriever(self.path, device, trusted, dense=self.dense)


def find_targets(names: Sequence[str], overrides: Sequence[str] = (), dense: Sequence[str] = ()) -> list[Target]:
    """The models of recipes, folders and names on the Hub; behind them those that are ``dense``. None is loaded.

    A label is the name of the recipe, or the last part of the path, without ``model``, in which recipes and trainers save;
    where that is not unique, the path without the folder that all have in common.
    """
    recipes = {name: load_recipe(name, overrides) for name in names if is_recipe(name)}
    if overrides and not recipes:
        raise RecipeError("--set overrides a key of a recipe, and no recipe is given.")
    labels, targets = _labels(dict.fromkeys([*names, *dense]), recipes), []
    for place, name in enumerate([*names, *dense]):
        recipe, is_dense = recipes.get(name), place >= len(names)
        path = name if recipe is None else str(Path(recipe.output_dir, MODEL_DIRECTORY))
        if recipe is not None and not os.path.isdir(path):
            raise RecipeError(f"{name}: there is no model in {path}; run `fastmaxsim train` with this recipe first.")
        if recipe is None or not recipe.model.visual:
            saved_class(path, dense=is_dense)
        factor = 1 if recipe is None else recipe.evaluation.pool_factor
        target = Target(labels[name] + "-dense" * is_dense, path, recipe, is_dense, factor)
        # Under another spelling as well: it would count as one more pair in the correction of p.
        if any(_scoring_of(target) == _scoring_of(other) for other in targets):
            raise RecipeError(f"each model must be given once, but {name} is given twice.")
        targets.append(target)
    return targets


def _labels(names: Iterable[str], recipes: dict[str, Recipe]) -> dict[str, str]:
    paths = {name: os.path.expanduser(name).rstrip("/").removesuffix(f"/{MODEL_DIRECTORY}") for name in names}
    short = {name: recipes[name].name if name in recipes else short_name(path) for name, path in paths.items()}
    counts = Counter(short.values())
    alike = [name for name in names if counts[short[name]] > 1]
    with suppress(ValueError):  # no folder in common, or of no two
        common = os.path.commonpath([paths[name] for name in alike])
        short |= {name: os.path.relpath(paths[name], common) if common else paths[name] for name in alike}
    counts = Counter(short.values())
    return {name: name if counts[label] > 1 else label for name, label in short.items()}


def short_name(path: str) -> str:
    """The last part of a path or of a name on the Hub; of ``.`` that of the folder."""
    return os.path.basename(os.path.abspath(os.path.expanduser(path)))


def _scoring_of(target: Target) -> tuple[str, Pooling, bool]:
    """The weights and the pooling behind the scores of a model."""
    return os.path.realpath(os.path.expanduser(target.path)), target.pooling, target.dense


def find_collection(targets: Sequence[Target], beir: str | None, split: str) -> tuple[str, Collection, Dataset | None]:
    """The name of the collection and the collection: that of ``--beir``, or that of the recipes.

    Of rows that a recipe holds out also those that it trains on.
    """
    visual = [target.label for target in targets if target.visual]
    if visual and (beir is not None or len(visual) < len(targets)):
        raise RecipeError(
            f"{visual[0]} retrieves pages; evaluate it without --beir, on the rows that its recipe holds out, and apart from "
            "models of texts."
        )
    if beir is not None:
        return beir, load_collection(beir, split, "--beir"), None
    recipes = [target.recipe for target in targets if target.recipe is not None]
    if not recipes:
        raise RecipeError("name a collection in BEIR's layout with --beir, or give the recipe of a model.")
    first = recipes[0]
    if other := next((recipe for recipe in recipes if _evaluation_data(recipe) != _evaluation_data(first)), None):
        raise RecipeError(
            f"{first.name} and {other.name} are evaluated on different data; name one collection for all with --beir."
        )
    section = first.evaluation
    if section.beir is not None:
        return section.beir, load_collection(section.beir, section.split), None
    if section.nano_beir is not None or not section.has_rows:
        has = "several collections (evaluation.nano_beir)" if section.nano_beir else "no data to evaluate on"
        raise RecipeError(f"{first.name} has {has}; name one collection with --beir.")
    prepared = prepare(first)
    data = load_data(prepared)
    return (
        f"rows held out {'for' if section.data else 'by'} {first.name}",
        collection_of(prepared, data.held_out),
        data.train,
    )


def _evaluation_data(recipe: Recipe) -> Any:
    """The keys that decide what a recipe is evaluated on."""
    section = recipe.evaluation
    if section.beir is not None:
        return section.beir, section.split
    return recipe.data, section.rows, section.data, section.nano_beir, recipe.loss.name == "distillation"


def load_searched_collection(
    beir: str | None, split: str, corpus: Path | None, queries: Path | None, qrels: Path | None
) -> Collection:
    """The collection of ``--beir``, with its judged queries, or that of ``--corpus``, ``--queries`` and ``--qrels``."""
    files = [corpus, queries]
    if (beir is None) == (files == [None, None] and qrels is None) or (beir is None and None in files):
        raise RecipeError(
            "Name what to search: --beir FOLDER_OR_NAME, or --corpus and --queries, and --qrels for metrics."
        )
    if beir is not None:
        return load_collection(beir, split, "--beir")
    return load_files_of_collection(corpus, queries, qrels)
