"""Measure the robustness of the model of a recipe, or of a model on a collection."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pylate_fastmaxsim.recipes.config.shipped import is_recipe
from pylate_fastmaxsim.recipes.data.collection import load_collection
from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.files import inputs_of, prepare_file, write_json
from pylate_fastmaxsim.recipes.models.retriever import retriever_of
from pylate_fastmaxsim.recipes.robustness.measure import Pair, Settings, measure
from pylate_fastmaxsim.recipes.robustness.task import Limits, collection_task, task_of
from pylate_fastmaxsim.recipes.search.run import best_device
from pylate_fastmaxsim.recipes.targets import find_targets
from pylate_fastmaxsim.recipes.training.inputs import load_data, prepare
from pylate_fastmaxsim.reporting.numbers import without_nan

RESULT_FILE = "robustness.json"


def robustness(
    name: str,
    settings: Settings,
    limits: Limits,
    overrides: Sequence[str] = (),
    beir: str | None = None,
    split: str = "test",
    output: str | None = None,
) -> tuple[dict[str, Any], list[Pair], Path]:
    """Measure a trained model, and write ``robustness.json``.

    ``name`` is a recipe whose model was trained before, or a model of texts, which needs a collection in BEIR's layout
    (``beir``). The pooling of a recipe is measured in any case. Results go to ``output``, to the recipe's ``output_dir``,
    or for a model to the working directory.

    Returns
    -------
    The content of ``robustness.json``, pairs to look at, and that file.
    """
    if beir is None and not is_recipe(name):
        raise RecipeError(
            f"{name} needs held-out data: name a collection in BEIR's layout with --beir, or give the recipe of the model."
        )
    (target,) = find_targets([name], overrides)
    if target.visual:
        raise RecipeError(f"{target.label} retrieves pages; fastmaxsim robustness makes documents of text longer.")
    recipe, directory, inputs = target.recipe, Path(), [Path(target.path).expanduser()]
    if recipe is not None:
        directory = Path(recipe.output_dir)
        inputs += inputs_of(recipe.model, recipe.data, recipe.evaluation)
    if beir is not None:
        inputs.append(Path(beir).expanduser())
    if output is not None:
        directory = Path(output).expanduser()
    for suffix in (".json", ".png", ".html"):
        prepare_file("--output", (directory / RESULT_FILE).with_suffix(suffix), inputs)
    if beir is not None:
        task = collection_task(beir, load_collection(beir, split, "--beir"), limits)
    else:
        prepared = prepare(recipe)
        task = task_of(prepared, load_data(prepared), limits)
    retriever = retriever_of(target.load(best_device(), trust_remote_code=False), finite=True)
    own = None if recipe is None else target.pooling
    measured, pairs = measure(retriever, task, settings, target.batch_size, own)
    names = {"model": target.path, "recipe": None if recipe is None else recipe.name}
    result = without_nan(names | measured)
    write_json(directory / RESULT_FILE, result)
    return result, pairs, directory / RESULT_FILE
