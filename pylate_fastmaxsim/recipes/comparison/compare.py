"""Train a recipe stock and fast, and compare time, memory and quality."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import yaml

from pylate_fastmaxsim.comparison.runs import NOT_RUN, OUT_OF_MEMORY, contrast, summarize
from pylate_fastmaxsim.recipes.config.dump import dump_recipe
from pylate_fastmaxsim.recipes.config.schema import EvaluationSection, Recipe
from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.files.json import without_nan, write_json
from pylate_fastmaxsim.recipes.files.lock import hold_lock
from pylate_fastmaxsim.recipes.files.write import make_directory
from pylate_fastmaxsim.recipes.models.load import load_model
from pylate_fastmaxsim.recipes.training.arguments import require_trainable, training_arguments
from pylate_fastmaxsim.recipes.training.inputs import load_data
from pylate_fastmaxsim.recipes.training.prepare import prepare

MODES = ("stock", "fast")
RESULT_FILE = "compare.json"
LOCK_FILE = "compare.lock"
SWEEP_STEPS = 9

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
    """Run a recipe stock and fast, one after the other, each in its own process, and compare them.

    Both start from the same rows in the same order and the same weights. ``output_dir`` receives
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
    The content of ``compare.json``, in which None stands for a number that is NaN or infinite. ``wall_seconds`` in its
    ``summary`` is how long each of the two runs took as a process, from its start to its end, less the evaluation of
    the untrained model, which one of them does for both, and the whole, with all that, what is prepared and the sweep.

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
    taken = f"output_dir: another command compares in {directory}; wait until it ends, or choose another folder."
    with hold_lock("output_dir", directory, LOCK_FILE, taken):
        return _compare(recipe, directory, on_progress, batch_sizes, begun)


def _compare(
    recipe: Recipe, directory: Path, on_progress: OnProgress, batch_sizes: Sequence[int], begun: float
) -> dict[str, Any]:
    prepared = prepare(recipe)
    # Fails here rather than in both runs, before anything is written. Also downloads everything once.
    data = load_data(prepared)
    rows = len(data.train) + len(data.held_out or ())
    if batch_sizes and max(batch_sizes) > rows:
        raise RecipeError(
            f"--sweep: batch_size must be at most {rows}, as many rows as the data has, got {max(batch_sizes)}."
        )
    load_model(prepared.model, "cpu", recipe.training.seed)
    make_directory("output_dir", directory / "compare")
    # Both start from the same model, so only one run evaluates it untrained.
    options = {"stock": (), "fast": ("--untrained",)}
    runs, wall = {}, {}
    for mode in MODES:
        run_begun = time.perf_counter()
        measured = _run(prepared, directory / "compare", mode, on_progress, f"{mode} run", *options[mode])
        runs[mode] = summarize(*measured)
        # The evaluation of the untrained model counts for neither run.
        wall[mode] = time.perf_counter() - run_begun - runs[mode].get("untrained_seconds", 0)
    wall["whole"] = time.perf_counter() - begun
    # As in the file, so that the terminal and the file show the same.
    comparison = without_nan(
        {
            "recipe": yaml.safe_load(dump_recipe(recipe)),
            "runs": runs,
            "summary": contrast(runs["stock"], runs["fast"]) | {"wall_seconds": wall},
        }
    )
    write_json(directory / RESULT_FILE, comparison)
    for points in _sweep(prepared, directory / "compare", sorted(set(batch_sizes)), on_progress):
        comparison["sweep"] = without_nan(points)
        comparison["summary"]["wall_seconds"]["whole"] = time.perf_counter() - begun
        write_json(directory / RESULT_FILE, comparison)
    return comparison


def _require_trainable(recipe: Recipe) -> None:
    """Refuse arguments that both runs would fail on, without using the GPU."""
    training = replace(recipe.training, use_cpu=True, precision="fp32")
    require_trainable(training_arguments(replace(recipe, training=training), report_to=[]))


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
        for mode in MODES:
            if any(point["status"] == OUT_OF_MEMORY for point in points[mode]):
                point = {"status": NOT_RUN}
            else:
                name = f"{mode}, batch of {batch_size}"
                sized = _of_size(prepared, batch_size)
                point = summarize(*_run(sized, directory, mode, on_progress, name, "--steps-only"))
            kept = ("status", "steps", "step_seconds", "documents_per_second", "memory", "warnings")
            points[mode].append({"batch_size": batch_size} | {key: point[key] for key in kept if key in point})
            yield points


def _run(
    prepared: Recipe, directory: Path, mode: str, on_progress: OnProgress, name: str, *options: str
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Measure one mode in a child process; return its result and the steps that it finished."""
    kinds = ("yaml", "steps.jsonl", "json", "log")
    stem = name.removesuffix(" run").replace(", batch of ", "-")
    recipe_file, steps_file, result_file, log_file = (directory / f"{stem}.{kind}" for kind in kinds)
    for file in (steps_file, result_file):
        file.unlink(missing_ok=True)
    recipe = replace(prepared, output_dir=str(directory), fast=replace(prepared.fast, enabled=mode == "fast"))
    recipe_file.write_text(dump_recipe(recipe), encoding="utf-8")
    command = [sys.executable, "-c", _program(), str(recipe_file), str(steps_file), str(result_file), *options]
    variables = {name: value for name, value in os.environ.items() if name != SWITCH_VARIABLE}
    with open(log_file, "w", encoding="utf-8") as log, _ended_by_signals():
        child = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=variables)
        try:
            while child.poll() is None:
                time.sleep(0.2)
                on_progress(_progress(name, read_steps(steps_file), log_file))
        except BaseException:
            child.kill()
            child.wait()
            raise
    steps = read_steps(steps_file)
    on_progress(_progress(name, steps, log_file))
    if result_file.exists():
        return json.loads(result_file.read_text(encoding="utf-8")), steps
    if child.returncode == -signal.SIGKILL:  # how the kernel ends a process when memory runs out
        return {"status": OUT_OF_MEMORY}, steps
    raise RunFailed(f"The {name} failed: {_last_line(log_file)} (see {log_file})")


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into SystemExit, so that the child process is ended too."""

    def end(signum: int, frame: object) -> NoReturn:
        sys.exit(128 + signum)

    previous = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is signal.SIG_DFL:  # nohup ignores SIGHUP
                previous[number] = signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _program() -> str:
    """Python code of the child process, with the ``sys.path`` of this one: ``-m`` would import from the working directory.

    On Linux the child is killed when this process ends in any way.
    """
    places = [place for place in sys.path if isinstance(place, str)]
    # PR_SET_PDEATHSIG, SIGKILL
    with_parent = "import ctypes; ctypes.CDLL(None).prctl(1, 9); " if sys.platform == "linux" else ""
    start = "from pylate_fastmaxsim.recipes.comparison.measure import main; main()"
    return f"{with_parent}import sys; sys.path[:] = {places!r}; {start}"


def _progress(name: str, steps: list[dict[str, Any]], log_file: Path) -> Progress:
    if not steps:
        return Progress(name, 0, None)
    of = steps[-1]["of"]
    return Progress(name, len(steps), of, _last_bar(log_file) if len(steps) == of else "")


def _last_bar(log_file: Path) -> str:
    """The newest tqdm progress bar near the end of a log."""
    with open(log_file, "rb") as log:
        log.seek(max(0, log_file.stat().st_size - 1000))
        lines = log.read().decode("utf-8", errors="replace").replace("\r", "\n").split("\n")
    newest = next((line.strip() for line in reversed(lines) if "%|" in line), "")
    return re.sub(r"\|.*\|", "", newest)


def read_steps(file: Path) -> list[dict[str, Any]]:
    """The steps written so far, without a last line that is incomplete."""
    if not file.exists():
        return []
    *lines, _ = file.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines]


def _last_line(log_file: Path) -> str:
    lines = log_file.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1].strip() if lines else "it wrote nothing"
