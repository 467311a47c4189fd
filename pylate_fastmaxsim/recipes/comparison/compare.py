"""Train a recipe stock and fast, and compare time, memory and quality."""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from pylate_fastmaxsim.comparison.runs import NOT_RUN, OUT_OF_MEMORY
from pylate_fastmaxsim.comparison.turns import ROUNDS, Child, ChildFailed, Turns, python, take_turns
from pylate_fastmaxsim.comparison.verdict import compared_runs, summary_of
from pylate_fastmaxsim.recipes.config.dump import dump_recipe
from pylate_fastmaxsim.recipes.config.schema import EvaluationSection, Recipe
from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.files import hold_lock, make_directory, require_outputs, without_nan, write_json
from pylate_fastmaxsim.recipes.models.load import load_model
from pylate_fastmaxsim.recipes.training.arguments import training_arguments
from pylate_fastmaxsim.recipes.training.inputs import load_data, prepare

MODES = ("stock", "fast")
RESULT_FILE = "compare.json"
LOCK_FILE = "compare.lock"
SWEEP_STEPS = 9
_PROGRAM = "from pylate_fastmaxsim.recipes.comparison.measure import main; main()"

# Removed from the environment of the runs, because it may switch the plugin off.
SWITCH_VARIABLE = "PYLATE_FASTMAXSIM"


class RunFailed(RuntimeError):
    """One of the two runs failed, and not for lack of memory."""


@dataclass(frozen=True)
class Progress:
    """Progress of a comparison: the name of the run, its steps, and after them its newest progress bar."""

    run: str
    steps: int
    of: int | None
    bar: str = ""


OnProgress = Callable[[Progress], None]


def compare(
    recipe: Recipe, on_progress: OnProgress = lambda progress: None, batch_sizes: Sequence[int] = ()
) -> dict[str, Any]:
    """Train a recipe stock and fast, each in its own process, step about, and compare them.

    Both start from the same rows in the same order and the same weights. Their steps take turns in blocks, so that
    other work on the machine meets both alike; they are evaluated one after the other. ``output_dir`` receives
    ``compare.json`` and, in ``compare/``, a log and the measured steps of each run.

    Parameters
    ----------
    recipe
        What to run; ``fast.enabled`` is set for each of the two.
    on_progress
        Called again and again while a run goes on.
    batch_sizes
        Of these sizes a few steps each are measured as well, both ways (see :func:`sweep`).

    Returns
    -------
    The content of ``compare.json``, in which None stands for a number that is NaN or infinite. ``speedup`` in its
    ``summary`` is the ratio of blocks that stood beside each other (see :func:`~pylate_fastmaxsim.comparison.verdict.verdict`,
    whose result is ``turns``). ``wall_seconds`` is how long each of the two had its turn, from its start to its end,
    less the evaluation of the untrained model, which one of them does for both, and how long the whole took, with all
    that, what is prepared and the sweep.

    Raises
    ------
    RecipeError
        The recipe does not fit its data, this is one of several processes of a launcher, or another command compares in
        ``output_dir`` at this moment.
    RunFailed
        With the last line of error of the run. What was measured before is in ``compare.json``.
    """
    begun = time.perf_counter()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise RecipeError("compare measures on one device; start it without a distributed launcher.")
    _require_trainable(recipe)
    directory = Path(recipe.output_dir)
    outputs = [str(Path(RESULT_FILE).with_suffix(suffix)) for suffix in (".json", ".png", ".html")]
    require_outputs("output_dir", directory, outputs, recipe.model, recipe.data, recipe.evaluation)
    taken = f"output_dir: another command compares in {directory}; wait until it ends, or choose another folder."
    with hold_lock("output_dir", directory, LOCK_FILE, taken):
        return _compare(recipe, directory, on_progress, batch_sizes, begun)


def _compare(
    recipe: Recipe, directory: Path, on_progress: OnProgress, batch_sizes: Sequence[int], begun: float
) -> dict[str, Any]:
    prepared = prepare(recipe)
    # Fails here rather than in both runs, before anything is written. Also downloads everything once.
    data = load_data(prepared)
    rows = math.inf if recipe.data.streaming else len(data.train) + len(data.held_out or ())
    if batch_sizes and max(batch_sizes) > rows:
        raise RecipeError(
            f"--sweep: batch_size must be at most {rows}, as many rows as the data has, got {max(batch_sizes)}."
        )
    load_model(prepared.model, "cpu", recipe.training.seed)
    make_directory("output_dir", directory / "compare")
    # Both start from the same model, so only one run evaluates it untrained.
    names = {mode: f"{mode} run" for mode in recipes_of(prepared)}
    turns = _run(prepared, directory / "compare", names, on_progress, {"fast": ["--untrained"]})
    compared = compared_runs(turns)
    wall = compared["summary"]["wall_seconds"]
    # The evaluation of the untrained model counts for neither run.
    wall["fast"] -= compared["runs"]["fast"].get("untrained_seconds", 0)
    wall["whole"] = time.perf_counter() - begun
    # As in the file, so that the terminal and the file show the same.
    comparison = without_nan({"recipe": yaml.safe_load(dump_recipe(recipe)), **compared})
    write_json(directory / RESULT_FILE, comparison)
    for points in _sweep(prepared, directory / "compare", sorted(set(batch_sizes)), on_progress):
        comparison["sweep"] = without_nan(points)
        comparison["summary"]["wall_seconds"]["whole"] = time.perf_counter() - begun
        write_json(directory / RESULT_FILE, comparison)
    return comparison


def _require_trainable(recipe: Recipe) -> None:
    """Refuse arguments that both runs would fail on, without using the GPU."""
    training = replace(recipe.training, use_cpu=True, precision="fp32")
    training_arguments(replace(recipe, training=training), report_to=[])


def recipes_of(recipe: Recipe) -> dict[str, Recipe]:
    """What is compared, by mode: the recipe without this package and with it."""
    return {mode: replace(recipe, fast=replace(recipe.fast, enabled=mode == "fast")) for mode in MODES}


def parse_sweep(text: str) -> list[int]:
    """The batch sizes of ``batch_size=64,256,1024``.

    Raises
    ------
    RecipeError
        It is written in another way.

    Examples
    --------
    >>> from pylate_fastmaxsim.recipes.comparison.compare import parse_sweep
    >>> parse_sweep("batch_size=64,256")
    [64, 256]
    """
    name, _, values = text.partition("=")
    sizes = [value.strip() for value in values.split(",")]
    if name.strip() != "batch_size" or not all(size.isdecimal() and int(size) for size in sizes):
        raise RecipeError(f"--sweep {text}: write it as batch_size=64,256,1024, with whole numbers of at least 1.")
    return [int(size) for size in sizes]


def _of_size(recipe: Recipe, batch_size: int) -> Recipe:
    """The recipe for a few steps of one batch size, on all rows."""
    training = replace(
        recipe.training, per_device_train_batch_size=batch_size, max_steps=SWEEP_STEPS, dataloader_drop_last=True
    )
    return replace(recipe, training=training, evaluation=EvaluationSection())


def _sweep(
    prepared: Recipe, directory: Path, batch_sizes: list[int], on_progress: OnProgress
) -> Iterator[dict[str, list[dict[str, Any]]]]:
    """Yield the points measured so far, by mode, after each new one.

    Sizes larger than the first that ran out of memory are not run.
    """
    points: dict[str, list[dict[str, Any]]] = {mode: [] for mode in MODES}
    for batch_size in batch_sizes:
        modes = [mode for mode in MODES if all(point["status"] != OUT_OF_MEMORY for point in points[mode])]
        names = {mode: f"{mode}, batch of {batch_size}" for mode in modes}
        sized = _of_size(prepared, batch_size)
        # A point has no verdict, which more rounds would be for.
        turns = _run(sized, directory, names, on_progress, dict.fromkeys(modes, ["--steps-only"]), rounds=1)
        for mode in MODES:
            point = summary_of(turns.runs[mode]) if mode in modes else {"status": NOT_RUN}
            kept = ("status", "steps", "step_seconds", "documents_per_second", "memory", "warnings")
            points[mode].append({"batch_size": batch_size} | {key: point[key] for key in kept if key in point})
        yield points


def _run(
    prepared: Recipe,
    directory: Path,
    names: Mapping[str, str],
    on_progress: OnProgress,
    options: Mapping[str, Sequence[str]],
    rounds: int = ROUNDS,
) -> Turns:
    """Measure modes in processes that take turns; ``names`` are those that their progress has."""
    children, files = {}, {}
    for mode, name in names.items():
        stem = name.removesuffix(" run").replace(", batch of ", "-")
        recipe_file, steps_file, again_file, log_file = (
            directory / f"{stem}.{kind}" for kind in ("yaml", "steps.jsonl", "again.steps.jsonl", "log")
        )
        steps_file.unlink(missing_ok=True)
        recipe = replace(recipes_of(prepared)[mode], output_dir=str(directory))
        # For the run that is started next, and for nobody else.
        recipe_file.write_text(dump_recipe(recipe), encoding="utf-8")
        children[mode] = Child(
            command=[*python(_PROGRAM), str(recipe_file), str(steps_file), *options.get(mode, ())],
            again=[*python(_PROGRAM), str(recipe_file), str(again_file), "--steps-only"],
            log=log_file,
            environment={name: value for name, value in os.environ.items() if name != SWITCH_VARIABLE},
        )
        files[mode] = steps_file, log_file
    try:
        turns = take_turns(
            children, rounds=rounds, on_wait=lambda mode: on_progress(_progress(names[mode], *files[mode]))
        )
    except ChildFailed as failed:
        name = names[failed.name]
        raise RunFailed(f"The {name} failed: {_last_line(failed.log)} (see {failed.log})") from None
    for mode, name in names.items():
        on_progress(_progress(name, *files[mode]))
    return turns


def _progress(name: str, steps_file: Path, log_file: Path) -> Progress:
    step = last_step(steps_file)
    if step is None:
        return Progress(name, 0, None)
    done, of = step["step"], step["of"]
    return Progress(name, done, of, _last_bar(log_file) if done == of else "")


def _last_bar(log_file: Path) -> str:
    """The newest tqdm progress bar near the end of a log."""
    lines = _tail(log_file).replace("\r", "\n").split("\n")
    newest = next((line.strip() for line in reversed(lines) if "%|" in line), "")
    return re.sub(r"\|.*\|", "", newest)


def last_step(file: Path) -> dict[str, Any] | None:
    """The last step written so far, without a line that is incomplete; None without a step."""
    lines = _tail(file).split("\n")[:-1] if file.exists() else []
    return json.loads(lines[-1]) if lines else None


def _tail(file: Path) -> str:
    """The end of a file that grows."""
    with open(file, "rb") as opened:
        opened.seek(max(0, file.stat().st_size - 1000))
        return opened.read().decode("utf-8", errors="replace")


def _last_line(log_file: Path) -> str:
    lines = log_file.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1].strip() if lines else "it wrote nothing"
