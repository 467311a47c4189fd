"""Find the model and the held-out data of a recipe, or of a model and a collection, and measure robustness."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pylate_fastmaxsim.recipes.config.kinds import ColBERTSection
from pylate_fastmaxsim.recipes.config.schema import Recipe, TextEvaluationSection
from pylate_fastmaxsim.recipes.config.shipped import is_recipe
from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.evaluation.beir import load_collection
from pylate_fastmaxsim.recipes.files.inputs import inputs_of
from pylate_fastmaxsim.recipes.files.json import without_nan, write_json
from pylate_fastmaxsim.recipes.files.write import prepare_file
from pylate_fastmaxsim.recipes.load import load_recipe
from pylate_fastmaxsim.recipes.models.load import is_missing_folder, load_model, load_trained
from pylate_fastmaxsim.recipes.pooling import final_pooling
from pylate_fastmaxsim.recipes.robustness.measure import Pair, Settings, measure
from pylate_fastmaxsim.recipes.robustness.task import Limits, Task, collection_task, task_of
from pylate_fastmaxsim.recipes.training.arguments import training_arguments
from pylate_fastmaxsim.recipes.training.inputs import load_data, prepare
from pylate_fastmaxsim.recipes.training.run_directory import MODEL_DIRECTORY

if TYPE_CHECKING:
    from pylate.models import ColBERT

RESULT_FILE = "robustness.json"


@dataclass(frozen=True)
class Target:
    """A model and what it is measured on."""

    model: ColBERT
    task: Task
    names: dict[str, Any]  # of model and recipe
    batch_size: int
    output: Path
    inputs: list[Path]


def robustness(
    target: str,
    settings: Settings,
    limits: Limits,
    overrides: Sequence[str] = (),
    beir: str | None = None,
    split: str = "test",
    output: str | None = None,
) -> tuple[dict[str, Any], list[Pair], Path]:
    """Measure a trained model, and write ``robustness.json``.

    Parameters
    ----------
    target
        A recipe, by its .yaml file or its name, whose model was trained before; or a ColBERT, by its folder or its name on the Hub.
    settings
        What is measured. The pooling of the recipe comes first, and is measured in any case.
    limits
        How many queries and documents.
    overrides
        ``key=value`` items of the recipe.
    beir
        A collection in BEIR's layout, in place of what the recipe is evaluated on; a model needs one.
    split
        Of its judgements.
    output
        Folder of the results; ``output_dir`` of the recipe, or the working directory for a model.

    Returns
    -------
    The content of ``robustness.json``, pairs to look at, and that file.

    Raises
    ------
    RecipeError
        There is no such recipe, model or data, or they do not fit.
    """
    section = TextEvaluationSection(beir=str(Path(beir).expanduser()), split=split) if beir is not None else None
    if is_recipe(target):
        recipe = load_recipe(target, overrides)
        own = final_pooling(recipe.loss.pooling)
        settings = replace(settings, poolings=tuple(dict.fromkeys((own, *settings.poolings))))
        found = _of_recipe(recipe, section, limits)
    else:
        if overrides:
            raise RecipeError(f"--set overrides a key of a recipe, and {target} is no recipe.")
        found = _of_model(target, section, limits)
    directory = found.output if output is None else Path(output).expanduser()
    for suffix in (".json", ".png", ".html"):
        prepare_file("--output", (directory / RESULT_FILE).with_suffix(suffix), found.inputs)
    measured, pairs = measure(found.model, found.task, settings, found.batch_size)
    result = without_nan(found.names | measured)
    write_json(directory / RESULT_FILE, result)
    return result, pairs, directory / RESULT_FILE


def _of_recipe(recipe: Recipe, section: TextEvaluationSection | None, limits: Limits) -> Target:
    if recipe.model.kind != "colbert":
        raise RecipeError(f"fastmaxsim robustness measures models of model.kind colbert, got {recipe.model.kind}.")
    folder = Path(recipe.output_dir, MODEL_DIRECTORY)
    if not folder.is_dir():
        raise RecipeError(f"output_dir: there is no model in {folder}; run `fastmaxsim train` with this recipe first.")
    device = training_arguments(recipe).device
    prepared = prepare(recipe)
    data = None if section is not None else load_data(prepared)
    model = load_trained(prepared.model, folder, device)
    if section is None:
        task = task_of(prepared, data, limits)
    else:
        task = collection_task(section.beir, load_collection(section), limits)
    names = {"model": str(folder), "recipe": recipe.name}
    inputs = [folder, *inputs_of(recipe.model, recipe.data, section or recipe.evaluation)]
    return Target(model, task, names, recipe.evaluation.batch_size, Path(recipe.output_dir), inputs)


def _of_model(name: str, section: TextEvaluationSection | None, limits: Limits) -> Target:
    if section is None:
        raise RecipeError(
            f"{name} needs held-out data: name a collection in BEIR's layout with --beir, or give the recipe of the model."
        )
    if is_missing_folder(name):
        raise RecipeError(f"there is no folder {name}, and a recipe ends with .yaml.")
    path = Path(name).expanduser()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    key = "the model"
    model = load_model(ColBERTSection(name_or_path=str(path) if path.is_dir() else name), device, seed=0, key=key)
    task = collection_task(section.beir, load_collection(section), limits)
    return Target(model, task, {"model": name, "recipe": None}, section.batch_size, Path(), [path, Path(section.beir)])
