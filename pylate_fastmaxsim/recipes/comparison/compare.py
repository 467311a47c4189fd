"""Train a recipe stock and fast, and compare time, memory and quality."""

import json
import os
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from pylate_fastmaxsim.comparison.report import RESULT_FILE, SUFFIXES
from pylate_fastmaxsim.comparison.turns import OUT_OF_MEMORY, ROUNDS, Child, ChildFailed, Turns, python, take_turns
from pylate_fastmaxsim.comparison.verdict import (
    FAST,
    MODES,
    NOT_RUN,
    STOCK,
    summarize_run,
    summarize_turns,
    timed_steps,
)
from pylate_fastmaxsim.files.replace import write_json
from pylate_fastmaxsim.recipes.config.schema import Recipe
from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.files import hold_lock, inputs_of, make_directory, require_output
from pylate_fastmaxsim.recipes.load import dump_recipe
from pylate_fastmaxsim.reporting.numbers import without_nan

LOCK_FILE = "compare.lock"
LOGS = "compare"
# Exit code of a run whose recipe cannot be trained, as the last line of its log says.
REFUSED = 2
_MODULE = "pylate_fastmaxsim.recipes.comparison.measure"
_POINT = ("status", "steps", "step_seconds", "documents_per_second", "memory", "warnings")
# Removed from the environment of the runs, because it may switch the plugin off.
SWITCH_VARIABLE = "PYLATE_FASTMAXSIM"


class RunFailed(RuntimeError):
    """One of the two runs failed, and not for lack of memory."""


def compare(recipe: Recipe, batch_sizes: Sequence[int] = ()) -> dict[str, Any]:
    """Train a recipe stock and fast, each in its own process, step about, and compare them.

    Both start from the same rows in the same order and the same weights. Their steps take turns in blocks, so that
    other work on the machine meets both alike; they are evaluated one after the other. ``output_dir`` receives
    ``compare.json`` and, in ``compare/``, a log and the measured steps of each run.

    Of ``batch_sizes`` a few steps each are measured as well, both ways; not of sizes larger than the first that ran out
    of memory.

    Returns the content of ``compare.json``: :func:`~pylate_fastmaxsim.comparison.verdict.summarize_turns`, the recipe and
    the ``sweep``. None stands for a number that is NaN or infinite. ``wall_seconds`` are less what one run does for both
    (what is prepared, and the evaluation of the untrained model); ``whole`` is with all that and the sweep. RunFailed has
    the last line of error of a run; what was measured before is in ``compare.json``.
    """
    begun = time.perf_counter()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise RecipeError("compare measures on one device; start it without a distributed launcher.")
    directory = Path(recipe.output_dir)
    inputs = inputs_of(recipe.model, recipe.data, recipe.evaluation)
    for suffix in SUFFIXES:
        require_output("output_dir", (directory / RESULT_FILE).with_suffix(suffix), inputs)
    # In one form for the runs and for compare.json.
    text = dump_recipe(recipe)
    lock = hold_lock("output_dir", directory / LOCK_FILE, f"{directory} is being compared in")
    with lock, tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch, "recipe.yaml")
        file.write_text(text, encoding="utf-8")
        return _compare(directory, file, sorted(set(batch_sizes)), begun)


def _compare(directory: Path, recipe_file: Path, batch_sizes: list[int], begun: float) -> dict[str, Any]:
    run = partial(_run, recipe_file, directory / LOGS)
    # Both start from the same model, so only one run evaluates it untrained.
    turns = run({STOCK: {"largest_batch": max(batch_sizes, default=0)}, FAST: {"untrained": True}})
    compared = summarize_turns(turns)
    for mode, result in compared["runs"].items():
        once = result.pop("prepare_seconds", 0) + result.get("untrained_seconds", 0)
        compared["summary"]["wall_seconds"][mode] -= once
    comparison = {"recipe": yaml.safe_load(recipe_file.read_text(encoding="utf-8")), **compared}
    points: dict[str, list[dict[str, Any]]] = {mode: [] for mode in MODES}
    for batch_size in (None, *batch_sizes):
        if batch_size is not None:
            fitting = [mode for mode in MODES if all(point["status"] != OUT_OF_MEMORY for point in points[mode])]
            # A point has no verdict, which more rounds would be for.
            turns = run(dict.fromkeys(fitting, {"batch_size": batch_size}), f"-{batch_size}", rounds=1)
            for mode in MODES:
                point = summarize_run(turns.runs[mode]) if mode in fitting else {"status": NOT_RUN}
                kept = {key: point[key] for key in _POINT if key in point}
                points[mode].append({"batch_size": batch_size, **kept})
            comparison["sweep"] = points
        comparison["summary"]["wall_seconds"]["whole"] = time.perf_counter() - begun
        # As in the file, so that the terminal and the file show the same.
        comparison = without_nan(comparison)
        write_json(directory / RESULT_FILE, comparison)
    return comparison


def _run(
    recipe_file: Path, logs: Path, options: Mapping[str, dict[str, Any]], suffix: str = "", rounds: int = ROUNDS
) -> Turns:
    """Train in processes that take turns, one for each mode in ``options``: keywords of ``measure``."""
    made = make_directory("output_dir", logs)
    environment = {name: value for name, value in os.environ.items() if name != SWITCH_VARIABLE}
    children = {
        mode: Child(
            python(f"from {_MODULE} import main; main({str(recipe_file)!r}, {mode == FAST}, **{keywords!r})"),
            logs / f"{mode}{suffix}.log",
            environment,
        )
        for mode, keywords in options.items()
    }
    try:
        turns = take_turns(children, rounds=rounds)
    except ChildFailed as failed:
        lines = failed.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        said = lines[-1].strip() if lines else "it wrote nothing"
        if failed.returncode != REFUSED:
            raise RunFailed(f"The {failed.name} run failed: {said} (see {failed.log})") from None
        if made:  # a recipe that cannot run leaves nothing behind
            shutil.rmtree(logs)
        raise RecipeError(said) from None
    for mode, run in turns.runs.items():
        steps = [json.dumps({"step": number, **step}) for number, step in enumerate(timed_steps(run), start=1)]
        (logs / f"{mode}{suffix}.steps.jsonl").write_text("".join(f"{step}\n" for step in steps), encoding="utf-8")
    return turns


def parse_sweep(text: str) -> list[int]:
    """The batch sizes of ``batch_size=64,256,1024``. RecipeError if it is written in another way."""
    name, _, values = text.partition("=")
    sizes = [value.strip() for value in values.split(",")]
    if name.strip() != "batch_size" or not all(size.isdecimal() and int(size) for size in sizes):
        raise RecipeError(f"--sweep {text}: write it as batch_size=64,256,1024, with whole numbers of at least 1.")
    return [int(size) for size in sizes]
