"""The result of a comparison: rows and sentences, a table for the terminal, a picture and a page."""

import math
import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

from pylate_fastmaxsim.comparison import figures
from pylate_fastmaxsim.comparison.figures import LABELS
from pylate_fastmaxsim.comparison.turns import FINISHED
from pylate_fastmaxsim.comparison.verdict import FAST, PHASES
from pylate_fastmaxsim.files.replace import write_json
from pylate_fastmaxsim.reporting.figures import write_png
from pylate_fastmaxsim.reporting.numbers import METRICS, format_bytes, format_number
from pylate_fastmaxsim.reporting.page import Section, write_page
from pylate_fastmaxsim.reporting.table import Rows, Table, console

RESULT_FILE = "compare.json"
SUFFIXES = (".json", ".png", ".html")
HEADER = ("", *LABELS, "fast / stock")

# Memory held by PyTorch's allocator over memory in use, from which on the report suggests another setting.
_MUCH_MORE = 1.25
# What lines of log say where texts are encoded with padding.
_PADDED = "with padding"
# Of which a step gains nothing, and a GPU has too little to do.
_LITTLE_PADDING, _FEW_TOKENS = 0.1, 8192


def comparison_table(comparison: dict[str, Any]) -> Table:
    """All that was measured: stock, fast, and fast against stock."""
    rows = [row for group in row_groups(comparison).values() for row in group]
    return Table(title_of(comparison), [HEADER, *rows], caption(comparison))


def row_groups(comparison: dict[str, Any]) -> dict[str, list[tuple[str, ...]]]:
    """Rows of a table by what they are of, without rows that no run has, as a script has no evaluation."""
    runs = [comparison["runs"][mode] for mode in LABELS]
    untrained = runs[1].get("untrained", {})
    summary = comparison["summary"]
    wall = summary.get("wall_seconds", {})
    cpu_ratio = (summary.get("turns") or {}).get("cpu_ratio")

    def row(title: str, values: Iterable[float | None], pattern: str, ratio: str = "") -> tuple[str, ...]:
        return (title, *(format_number(pattern, value) for value in values), ratio)

    def measured(title: str, key: str, pattern: str, ratio: str = "") -> tuple[str, ...]:
        return row(title, (run.get(key) for run in runs), pattern, ratio)

    def memory(title: str, key: str, ratio: str = "") -> tuple[str, ...]:
        return (title, *(_memory(run, key) for run in runs), ratio)

    quality = []
    for key, title in METRICS.items():
        ratio = format_number("{:+.4f}", summary.get("ndcg@10_difference")) if key == "ndcg@10" else ""
        quality.append(measured(title, key, "{:.4f}", ratio))
        if any(key in run for run in runs):
            # Both have the same model before training, which one of them evaluates.
            quality.append(row("  before training", [untrained.get(key)] * 2, "{:.4f}"))
    groups = {
        "step": [
            ("median step", *map(_median_step, runs), speed(summary)),
            measured("  CPU time", "cpu_step_seconds", "{:.3f} s", format_number("{:.2g}x", cpu_ratio)),
        ],
        "phases": [
            row(f"  {phase}", (run.get("phases", {}).get(phase) for run in runs), "{:.3f} s") for phase in PHASES
        ],
        "memory": [
            memory("peak memory", "peak", format_number("{:.0%}", summary["peak_memory"])),
            memory("  before training", "before"),
            memory("  held by PyTorch's allocator", "held"),
            row("whole run, wall clock", (wall.get(mode) for mode in LABELS), "{:.1f} s"),
            measured("documents per second", "documents_per_second", "{:,.0f}"),
            measured("live tokens per second", "live_tokens_per_second", "{:,.0f}"),
        ],
        "padding": [measured("padding in documents encoded", "padding", "{:.0%}")],
        "loss": [("last loss", *map(_last_loss, runs), "")],
        "quality": quality,
    }
    return {group: [row for row in rows if set(row[1:3]) != {"-"}] for group, rows in groups.items()}


def title_of(comparison: dict[str, Any]) -> str:
    """The name of what was compared, and the device."""
    return f"{comparison['recipe']['name']} on {_environment(comparison).get('device', 'unknown device')}"


def headline(comparison: dict[str, Any]) -> str:
    """The verdict on speed and memory in one sentence."""
    summary, title = comparison["summary"], title_of(comparison)
    if summary["speedup"] is None:
        gone = " and ".join(LABELS[mode] for mode, run in comparison["runs"].items() if run["status"] != FINISHED)
        return f"{title}: {f'{gone} ran out of memory' if gone else 'too few steps for a verdict on the speed'}"
    step = (
        "no verdict on the speed, the machine was busy" if _machine_was_busy(summary) else f"{speed(summary)} per step"
    )
    return f"{title}: {step}, {summary['peak_memory']:.0%} of the peak memory"


def speed(summary: dict[str, Any]) -> str:
    """The speed of a run relative to stock; of a busy machine only the ratio, rounded."""
    if summary["speedup"] is None:
        return "-"
    return f"{summary['speedup']:.2g} (busy)" if _machine_was_busy(summary) else f"{summary['speedup']:.2f}x as fast"


def caption(comparison: dict[str, Any]) -> str:
    """Sentences on what the numbers mean, how close the losses are and how long the comparison took."""
    summary, recipe = comparison["summary"], comparison["recipe"]
    steps = min(run["steps"] for run in comparison["runs"].values())
    difference, nan_from = summary["largest_loss_difference"], summary["loss_difference_nan_from"]
    largest = f"NaN, first at step {nan_from}" if nan_from is not None else format_number("{:.2g}", difference)
    on_gpu = "CPU" not in title_of(comparison).rpartition(" on ")[2]
    before = ", before evaluation" if "model" in recipe else ""  # not of a script
    sentences = [
        *_speed_sentences(comparison),
        "Steps after warm-up, data loading included; memory "
        f"{'allocated on the GPU' if on_gpu else 'resident in the process'}{before}.",
    ]
    if largest != "-":
        sentences.append(f"Largest difference of the loss curves over {steps} steps: {largest}.")
    if (whole := summary.get("wall_seconds", {}).get("whole")) is not None:
        sentences.append(f"The whole comparison took {whole:.0f} s.")
    if recipe.get("loss", {}).get("pooling") is not None:
        sentences.append(
            "Stock PyLate has no pooling but the maximum: the stock run scored with the same pooling in plain PyTorch "
            "(einsum and a top-k, softmax or log-sum-exp of all similarities), in training and evaluation."
        )
    memories = [run.get("memory", {}) for run in comparison["runs"].values()]
    if any(found.get("held", 0) > _MUCH_MORE * found.get("peak", 0) for found in memories):
        sentences.append(
            "PyTorch's allocator held much more than was in use, as it does where batches differ in size: "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the environment avoids most of that."
        )
    return "\n".join([" ".join(sentences), *decisions(comparison), *_why_slower(comparison)])


def decisions(comparison: dict[str, Any]) -> list[str]:
    """Whether fast encoded the texts packed, grouped or padded, a line for each model, and for a loss that pads them."""
    fast = comparison["runs"][FAST]
    found = fast.get("decisions", [])
    padded = [line for line in fast.get("warnings", []) if _PADDED in line and not any(line in said for said in found)]
    return [f"fast run: {line}" for line in [*found, *padded]]


def _why_slower(comparison: dict[str, Any]) -> list[str]:
    summary, (stock, fast) = comparison["summary"], (comparison["runs"][mode] for mode in LABELS)
    if summary["speedup"] is None or summary["speedup"] >= 1 or _machine_was_busy(summary):
        return []
    found = []
    if any(_PADDED in line for line in decisions(comparison)):
        found.append("fast encodes with padding as well, so that only scores are left to save on.")
    elif (padding := stock.get("padding", 1)) < _LITTLE_PADDING:
        found.append(f"of the tokens that stock encodes {padding:.0%} are padding, so there is little to leave out.")
    tokens = sum(fast.get("tokens_per_step", {}).values())
    if 0 < tokens < _FEW_TOKENS and not _environment(comparison).get("device", "CPU").startswith("CPU"):
        found.append(f"a step has {tokens:,.0f} tokens, for which the GPU waits for the host; larger batches fill it.")
    return [f"fast is slower here: {sentence}" for sentence in found]


def _speed_sentences(comparison: dict[str, Any]) -> list[str]:
    summary = comparison["summary"]
    turns = summary.get("turns")
    if turns is None:
        return []
    low, high = turns["quartiles"]
    pairs = "1 pair" if turns["pairs"] == 1 else f"{turns['pairs']} pairs"
    how = ["The device does not take both processes at once, so each was started alone, in turns."]
    how = how if summary["restarted"] else []
    if turns["busy"]:
        about = f"There is no verdict on the speed; the ratio was about {turns['ratio']:.2g}."
        contradicted = "step_seconds" not in comparison["runs"][FAST]
        hidden = ["Median steps, which contradict it, are left out."] * contradicted
        return [turns["why_busy"], about, *hidden, *how]
    spread = f", half of them from {low:.2f} to {high:.2f}" if turns["pairs"] > 1 else ""
    return [*how, f"Speed: the median ratio of {pairs} of blocks that stood beside each other{spread}."]


def labelled_warnings(comparison: dict[str, Any]) -> list[str]:
    """The warnings of the runs, each with the run that logged it."""
    stock, fast = (comparison["runs"][mode].get("warnings", []) for mode in LABELS)
    said = [f"{'both runs' if warning in stock else 'fast run'}: {warning}" for warning in fast]
    said = [line for line in said if not any(line.partition(": ")[2] in shown for shown in decisions(comparison))]
    return said + [f"stock run: {warning}" for warning in stock if warning not in fast]


def _median_step(run: dict[str, Any]) -> str:
    return format_number("{:.3f} s", run.get("step_seconds")) if run["status"] == FINISHED else run["status"]


def _memory(run: dict[str, Any], key: str) -> str:
    return format_bytes(run["memory"].get(key)) if run["status"] == FINISHED else "-"


def _last_loss(run: dict[str, Any]) -> str:
    """The last loss as text: a dash without a step, NaN if it is not finite (null in ``compare.json``)."""
    if not run["losses"]:
        return "-"
    last = run["losses"][-1]
    return "NaN" if last is None or not math.isfinite(last) else f"{last:.4f}"


def _machine_was_busy(summary: dict[str, Any]) -> bool:
    return bool((summary.get("turns") or {}).get("busy"))


def _environment(comparison: dict[str, Any]) -> dict[str, Any]:
    """Machine and versions, from the first run that recorded them."""
    return next((run["environment"] for run in comparison["runs"].values() if "environment" in run), {})


def sweep_rows(points: dict[str, list[dict[str, Any]]]) -> Rows:
    """Step time and peak memory of each batch size, stock and fast; the first row is the header."""
    rows = [("batch size", *(f"{mode}, {what}" for mode in points for what in ("median step", "peak memory")))]
    for row in zip(*points.values(), strict=False):
        cells = [text for point in row for text in (_median_step(point), _memory(point, "peak"))]
        rows.append((f"{row[0]['batch_size']:,}", *cells))
    return rows


def publish(comparison: dict[str, Any], file: Path) -> None:
    """Print a comparison and the warnings of its runs, write it as JSON, PNG and HTML, and print the names of these files."""
    try:
        show = console().print
    except ModuleNotFoundError:
        show = print
    # Before anything that may fail, because measuring took long.
    show(comparison_table(comparison))
    if points := comparison.get("sweep"):
        show(Table("against batch size", sweep_rows(points), left=0))
    for warning in labelled_warnings(comparison):
        print(warning, file=sys.stderr)
    write_json(file, comparison)
    try:
        write_pictures(comparison, file)
    except ModuleNotFoundError as error:
        print(f"There is no PNG and no HTML: {str(error.name).partition('.')[0]} is missing.", file=sys.stderr)
        print(file)
    else:
        print(*(file.with_suffix(suffix) for suffix in SUFFIXES), sep="\n")


def write_pictures(comparison: dict[str, Any], file: Path) -> None:
    """Write ``compare.html`` and ``compare.png`` beside ``compare.json``; needs matplotlib, Jinja2 and PyYAML."""
    name = comparison["recipe"]["name"]
    write_page(
        file.with_suffix(".html"),
        title=f"{name}: stock and fast",
        name=name,
        headline=headline(comparison),
        warnings=labelled_warnings(comparison),
        sections=_sections(comparison),
        environment=_environment(comparison),
        settings=("Recipe" if "model" in comparison["recipe"] else "Command", comparison["recipe"]),
    )
    draw = partial(figures.draw_overview, comparison["runs"])
    write_png(file.with_suffix(".png"), draw, headline(comparison), 11, 4.6)


def _sections(comparison: dict[str, Any]) -> list[Section]:
    runs, groups = comparison["runs"], row_groups(comparison)
    measured = [HEADER, *groups["step"], *groups["memory"], *groups["loss"]]
    overview = partial(figures.draw_overview, runs)
    sections = [Section("Loss, step time and memory", caption(comparison), measured, overview, (11, 4.4))]
    if rows := groups["phases"]:
        note = (
            "Median of a few more steps of the trained model, timed phase by phase. Tokenise is what the step waits for "
            "its rows; encode is every forward of the encoder; score is the rest of the loss; optimise is all that follows "
            "the backward."
        )
        phases = partial(figures.draw_stacked, "phases", runs)
        sections.append(Section("Where a step's time goes", note, [HEADER, *rows], phases, (8.5, 2.3)))
    if rows := groups["padding"]:
        note = "Tokens that the encoder computed; padding takes time and memory and changes nothing."
        tokens = partial(figures.draw_stacked, "tokens_per_step", runs)
        sections.append(Section("What was padded away", note, [HEADER, *rows], tokens, (8.5, 2.3)))
    if rows := groups["quality"]:
        note = (
            "Before training both runs have the same model, evaluated once, which is not counted in the wall clock of "
            "either."
        )
        sections.append(Section("Retrieval quality before and after", note, [HEADER, *rows]))
    if points := comparison.get("sweep"):
        sweep = partial(figures.draw_sweep, points, _environment(comparison).get("device_memory"))
        sections.append(Section("Against batch size", "", sweep_rows(points), sweep, (8.5, 3.6)))
    return sections
