"""The result of a comparison as one self-contained HTML file."""

from __future__ import annotations

import base64
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

from pylate_fastmaxsim.comparison import figures
from pylate_fastmaxsim.comparison.report import (
    GIBIBYTE,
    METRICS,
    caption,
    final_loss,
    form,
    headline,
    memory,
    sweep_rows,
    warnings_of,
)
from pylate_fastmaxsim.comparison.runs import FINISHED, NO_BATCH, OUT_OF_MEMORY, PHASES
from pylate_fastmaxsim.files.replace import replace_file

TEMPLATE = "report.html.jinja"

Rows = list[tuple[str, ...]]


def write_html(comparison: dict[str, Any], file: Path) -> None:
    """Write the report of a comparison, the content of ``compare.json``."""
    name = comparison["recipe"]["name"]
    write_page(
        file,
        title=f"{name}: stock and fast",
        name=name,
        headline=headline(comparison),
        warnings=warnings_of(comparison),
        sections=_sections(comparison),
        environment=_environment(comparison["runs"]),
        settings=("Recipe" if "model" in comparison["recipe"] else "Command", comparison["recipe"]),
    )


def write_page(
    file: Path, *, environment: dict[str, Any], settings: tuple[str, dict[str, Any]], **content: Any
) -> None:
    """Write a report: a headline, sections, versions, and settings under a title. ``content`` is named in the template."""
    import yaml
    from jinja2 import Environment

    text = files(__package__).joinpath(TEMPLATE).read_text(encoding="utf-8")
    page = Environment(autoescape=True).from_string(text)
    title, values = settings
    html = page.render(
        environment=_readable(environment),
        settings_title=title,
        settings=yaml.safe_dump(values, sort_keys=False, allow_unicode=True),
        **content,
    )
    replace_file(file, html.encode())


def _environment(runs: dict[str, Any]) -> dict[str, Any]:
    """Machine and versions, from the first run that recorded them."""
    return next((run["environment"] for run in runs.values() if "environment" in run), {})


def _readable(environment: dict[str, Any]) -> dict[str, Any]:
    total = environment.get("device_memory")
    shown = {} if total is None else {"device_memory": f"{total / GIBIBYTE:.1f} GiB"}
    return {key.replace("_", " "): value for key, value in (environment | shown).items()}


def _sections(comparison: dict[str, Any]) -> list[dict[str, Any]]:
    runs = comparison["runs"]
    sections = [
        section(
            "Step time and memory",
            caption(comparison),
            _time_rows(runs, comparison["summary"].get("wall_seconds", {})),
            figures.time_and_memory(runs),
            (8.5, 3.2),
        ),
    ]
    if any(run["losses"] for run in runs.values()):
        sections.append(section("Loss", "", [], figures.losses(runs), (8.5, 3.6)))
    if any("phases" in run for run in runs.values()):
        note = (
            "Median of a few more steps of the trained model, timed phase by phase. Tokenise is what the step waits for "
            "its rows; encode is every forward of the encoder; score is the rest of the loss; optimise is all that follows "
            "the backward."
        )
        sections.append(section("Where a step's time goes", note, _phase_rows(runs), figures.phases(runs), (8.5, 2.3)))
    if any("tokens_per_step" in run for run in runs.values()):
        note = "Tokens that the encoder computed; padding takes time and memory and changes nothing."
        sections.append(section("What was padded away", note, _token_rows(runs), figures.tokens(runs), (8.5, 2.3)))
    if quality := _quality_rows(runs):
        note = (
            "Before training both runs have the same model, evaluated once, which is not counted in the wall clock of "
            "either."
        )
        sections.append(section("Retrieval quality before and after", note, quality))
    if points := comparison.get("sweep"):
        draw = figures.sweep(points, _environment(runs).get("device_memory"))
        sections.append(section("Against batch size", sweep_sentence(points), sweep_rows(points), draw, (8.5, 3.6)))
    return sections


def section(
    title: str,
    note: str,
    rows: Rows,
    draw: Callable[[Any], None] | None = None,
    size: tuple[float, float] = (0.0, 0.0),
) -> dict[str, Any]:
    """A section of a page: a title, a note, a table whose first row is the header, and a figure of ``size`` in inches."""
    image = base64.b64encode(figures.svg(draw, *size).encode()).decode() if draw else None
    return {"title": title, "note": note, "rows": rows, "image": image}


def _row(title: str, values: list[float | None], pattern: str) -> tuple[str, ...]:
    return (title, *(form(pattern, value) for value in values))


def _time_rows(runs: dict[str, Any], wall_seconds: dict[str, float]) -> Rows:
    both = list(runs.values())
    rows = [
        ("", *runs),
        ("status", *(run["status"] for run in both)),
        ("steps", *(str(run["steps"]) for run in both)),
        _row("median step", [run.get("step_seconds") for run in both], "{:.3f} s"),
        _row("CPU time of a step", [run.get("cpu_step_seconds") for run in both], "{:.3f} s"),
        ("peak memory", *(memory(run, "peak") for run in both)),
        ("of it before training", *(memory(run, "before") for run in both)),
        ("held by PyTorch's allocator", *(memory(run, "held") for run in both)),
        _row("documents per second", [run.get("documents_per_second") for run in both], "{:,.0f}"),
        ("last loss", *(final_loss(run) for run in both)),
        _row("whole run, wall clock", [wall_seconds.get(mode) for mode in runs], "{:.1f} s"),
    ]
    return [row for row in rows if set(row[1:]) != {"-"}]


def _phase_rows(runs: dict[str, Any]) -> Rows:
    parts = [run.get("phases", {}) for run in runs.values()]
    rows = [_row(phase, [part.get(phase) for part in parts], "{:.4f} s") for phase in PHASES]
    total = _row("together", [sum(part.values()) if part else None for part in parts], "{:.4f} s")
    return [("a step", *runs), *rows, total]


def _token_rows(runs: dict[str, Any]) -> Rows:
    parts = [run.get("tokens_per_step", {}) for run in runs.values()]
    titles = {"documents": "of documents", "queries": "of queries", "padding": "padding of documents"}
    rows = [_row(title, [part.get(name) for part in parts], "{:,.0f}") for name, title in titles.items()]
    share = _row("padding of what documents took", [run.get("padding") for run in runs.values()], "{:.1%}")
    return [("tokens a step", *runs), *rows, share]


def _quality_rows(runs: dict[str, Any]) -> Rows:
    untrained = runs["fast"].get("untrained", {})
    rows = [
        _row(title, [untrained.get(key), *(run.get(key) for run in runs.values())], "{:.4f}")
        for key, title in METRICS.items()
        if any(measured.get(key) is not None for measured in (untrained, *runs.values()))
    ]
    return [("", "before", *(f"after, {mode}" for mode in runs)), *rows] if rows else []


def sweep_sentence(points: dict[str, list[dict[str, Any]]]) -> str:
    """One sentence for each mode: up to which batch size it ran, and where it ran out of memory."""
    sentences = []
    for mode, row in points.items():
        fitting = [point["batch_size"] for point in row if point["status"] == FINISHED]
        failing = [point["batch_size"] for point in row if point["status"] == OUT_OF_MEMORY]
        if failing and fitting:
            sentences.append(f"{mode} takes a batch of {max(fitting):,} and runs out of memory at {min(failing):,}.")
        elif failing:
            sentences.append(f"{mode} runs out of memory at {min(failing):,}, the smallest batch tried.")
        elif fitting:
            sentences.append(f"{mode} takes every batch tried, up to {max(fitting):,}.")
    empty = sorted({point["batch_size"] for row in points.values() for point in row if point["status"] == NO_BATCH})
    if empty:
        sentences.append(f"no batch of {' or '.join(f'{size:,}' for size in empty)} can be made of the rows.")
    return " ".join(sentence[0].upper() + sentence[1:] for sentence in sentences)
