"""Train a recipe the stock way and the fast way, and set what they cost side by side."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from pylate_fastmaxsim.recipes.data import load_data
from pylate_fastmaxsim.recipes.load import dump_recipe
from pylate_fastmaxsim.recipes.measure import FINISHED, OUT_OF_MEMORY
from pylate_fastmaxsim.recipes.model import load_model
from pylate_fastmaxsim.recipes.prepare import prepare
from pylate_fastmaxsim.recipes.schema import Recipe, RecipeError

MODES = ("stock", "fast")
WARM_UP_STEPS = 5

# Would make the fast run stock.
SWITCH_VARIABLE = "PYLATE_FASTMAXSIM"


class RunFailed(RuntimeError):
    """One of the two runs ended with an error other than running out of memory."""


def compare(recipe: Recipe, on_step: Callable[[str, int], None] = lambda mode, step: None) -> dict[str, Any]:
    """Run a recipe stock and fast, one after the other, each in its own process, and compare them.

    Both start from the same rows in the same order and the same weights. ``output_dir`` receives
    ``compare.json`` and, in ``compare/``, a log and the measured steps of each run.

    Parameters
    ----------
    recipe
        What to run; ``fast.enabled`` is set for each of the two.
    on_step
        Called with the mode and the number of steps done so far while a run goes on.

    Returns
    -------
    The content of ``compare.json``.

    Raises
    ------
    RecipeError
        The recipe does not fit its data, or this is one of several processes of a launcher.
    RunFailed
        With the last line of error of the run.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise RecipeError("compare measures on one device; start it without a distributed launcher.")
    prepared = prepare(recipe)
    # Both runs would fail on these: better here, before anything is written. It also downloads them once.
    load_data(prepared)
    load_model(prepared.model, "cpu", recipe.training.seed)
    directory = Path(recipe.output_dir)
    (directory / "compare").mkdir(parents=True, exist_ok=True)
    runs = {mode: summarize(*_run(prepared, directory / "compare", mode, on_step)) for mode in MODES}
    comparison = {
        "recipe": yaml.safe_load(dump_recipe(recipe)),
        "runs": runs,
        "summary": contrast(runs["stock"], runs["fast"]),
    }
    (directory / "compare.json").write_text(json.dumps(comparison, indent=2) + "\n", encoding="utf-8")
    return comparison


def _run(
    prepared: Recipe, directory: Path, mode: str, on_step: Callable[[str, int], None]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Measure one mode in a child process: its result, and the steps it finished."""
    kinds = ("yaml", "steps.jsonl", "json", "log")
    recipe_file, steps_file, result_file, log_file = (directory / f"{mode}.{kind}" for kind in kinds)
    for file in (steps_file, result_file):
        file.unlink(missing_ok=True)
    recipe = replace(prepared, output_dir=str(directory), fast=replace(prepared.fast, enabled=mode == "fast"))
    recipe_file.write_text(dump_recipe(recipe), encoding="utf-8")
    command = [sys.executable, "-m", "pylate_fastmaxsim.recipes.measure"]
    command += [str(recipe_file), str(steps_file), str(result_file)]
    variables = {name: value for name, value in os.environ.items() if name != SWITCH_VARIABLE}
    with open(log_file, "w", encoding="utf-8") as log:
        child = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=variables)
        try:
            while child.poll() is None:
                time.sleep(0.2)
                on_step(mode, len(read_steps(steps_file)))
        except BaseException:
            child.kill()
            child.wait()
            raise
    steps = read_steps(steps_file)
    on_step(mode, len(steps))
    if result_file.exists():
        return json.loads(result_file.read_text(encoding="utf-8")), steps
    if child.returncode == -signal.SIGKILL:  # how the kernel ends a process when memory runs out
        return {"status": OUT_OF_MEMORY}, steps
    raise RunFailed(f"The {mode} run failed: {_last_line(log_file)} (see {log_file})")


def read_steps(file: Path) -> list[dict[str, Any]]:
    """The steps written so far; a last line that is not finished yet does not count."""
    if not file.exists():
        return []
    *lines, _ = file.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines]


def _last_line(log_file: Path) -> str:
    lines = log_file.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1].strip() if lines else "it wrote nothing"


def summarize(result: dict[str, Any], steps: list[dict[str, Any]]) -> dict[str, Any]:
    """One run in numbers. Times and rates leave out the warm-up: the first steps, at most a third of all."""
    measured = steps[min(WARM_UP_STEPS, len(steps) // 3) :]
    run = {**result, "steps": len(steps), "losses": [step["loss"] for step in steps]}
    if not measured:
        return run
    seconds = sum(step["seconds"] for step in measured)
    totals = {name: sum(step[name] for step in steps) for name in ("live", "encoded", "query_tokens")}
    return {
        **run,
        "step_seconds": statistics.median(step["seconds"] for step in measured),
        "documents_per_second": sum(step["documents"] for step in measured) / seconds,
        "live_tokens_per_second": sum(step["live"] for step in measured) / seconds,
        "padding": 1 - totals["live"] / (totals["encoded"] - totals["query_tokens"]),
    }


def contrast(stock: dict[str, Any], fast: dict[str, Any]) -> dict[str, Any]:
    """What the fast run gains over the stock run; None where one of them ran out of memory."""
    both = stock["status"] == fast["status"] == FINISHED
    differences = [abs(a - b) for a, b in zip(stock["losses"], fast["losses"], strict=False)]
    return {
        "speedup": stock["step_seconds"] / fast["step_seconds"] if both else None,
        "peak_memory": fast["memory"]["peak"] / stock["memory"]["peak"] if both else None,
        "largest_loss_difference": max(differences, default=None),
        "ndcg@10_difference": fast["ndcg@10"] - stock["ndcg@10"] if both and stock["ndcg@10"] is not None else None,
    }
