"""Training steps by the share of padding: documents of several mean lengths, stock PyLate and this package.

    python -m benchmarks.training.lengths                       # measure what is missing, then print the table
    python -m benchmarks.training.lengths --render-only         # table and plot from the committed results

Steps are those of train_step.py at one batch size. Lengths are log-normal and truncated at 300, to which PyLate pads;
with a mean of 3,000 every document is truncated and there is no padding. Stock and fast
take turns, or with --alone warm up at once and are measured one after the other. Options that are not listed here are those of cell.py.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path

from benchmarks.harness.paths import RESULTS
from benchmarks.harness.plots import COLOURS, plt
from benchmarks.harness.records import SWITCH, Results, add_options, environment
from benchmarks.harness.tables import table
from benchmarks.harness.turns import add_alone, speed
from benchmarks.training.cell_processes import measure, measure_together
from benchmarks.training.plots import MEASURES
from benchmarks.training.train_step import mark_of_runs, row_title, time_and_memory

PATHS = {"stock": COLOURS[0], "fast": COLOURS[-1]}


def cell_name(path: str, tokens: int, compiled: bool) -> str:
    return f"{path}/tokens={tokens}/compile={int(compiled)}"


def mean_lengths(cells: dict) -> list[int]:
    """The mean lengths with a measured step, from which the share of padding is known."""
    return sorted({cell["tokens"] for cell in cells.values() if cell["status"] == "ok"})


def live_share(cells: dict, tokens: int) -> float:
    """The share of the padded documents that is not padding."""
    return next(
        cell["live_document_tokens"] / cell["padded_document_tokens"]
        for cell in cells.values()
        if cell["tokens"] == tokens and cell["status"] == "ok"
    )


def markdown_table(cells: dict) -> str:
    """Step time and peak memory by the share of padding, with the speed relative to stock."""
    pairs = list(itertools.product([False, True], PATHS))
    titles = [row_title(path, compiled) for compiled, path in pairs]
    lines = []
    for tokens in mean_lengths(cells):
        entries = [f"{1 - live_share(cells, tokens):.0%}"]
        for compiled, path in pairs:
            cell, stock = (cells.get(cell_name(name, tokens, compiled)) for name in (path, "stock"))
            text = time_and_memory(cell) if cell else ""
            if path == "fast" and cell and stock and stock["status"] == cell["status"] == "ok":
                text += f" ({speed(cell, stock)}{mark_of_runs(cell, stock)})"
            entries.append(text)
        lines.append(entries)
    return table(["padding", *titles], lines)


def plot(cells: dict, target: Path) -> None:
    figure, axes = plt.subplots(1, 2, figsize=(11, 5))
    for axis, (key, (label, _)) in zip(axes, MEASURES.items(), strict=True):
        for compiled, (path, colour) in itertools.product([False, True], PATHS.items()):
            found = {
                tokens: cells.get(cell_name(path, tokens, compiled), {}).get(key) for tokens in mean_lengths(cells)
            }
            points = [(live_share(cells, tokens), value) for tokens, value in found.items() if value is not None]
            if points:
                title = row_title(path, compiled).replace("`", "")
                axis.plot(*zip(*points, strict=True), "o--" if compiled else "o-", color=colour, label=title)
        axis.set(xlabel="share of the padded documents that is not padding", ylabel=label, xlim=(0, 1.02))
        axis.set_ylim(bottom=0)
        axis.xaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8, frameon=False)
    figure.tight_layout()
    figure.savefig(target, dpi=150)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, RESULTS / "lengths.json", timeout=240)
    add_alone(parser)
    parser.add_argument("--tokens", type=int, nargs="+", default=[40, 80, 150, 300, 3000], help="means of the lengths")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--compile", choices=list(SWITCH), default="both")
    options, extra = parser.parse_known_args()
    results = Results(options)
    run = measure if options.alone else measure_together
    pairs = itertools.product(SWITCH[options.compile], options.tokens)
    for compiled, tokens in [] if options.render_only else pairs:
        names = {path: cell_name(path, tokens, compiled) for path in PATHS}
        missing = [path for path in PATHS if results.wants(names[path])]
        if not missing:
            continue
        cells = [
            {"path": path, "batch": options.batch, "compile": compiled, "checkpointing": False} for path in missing
        ]
        for index, result in run(cells, [*extra, "--mean-tokens", str(tokens)], options.timeout):
            cell = {"cell": cells[index], "tokens": tokens, "options": extra, **result, "environment": environment()}
            shown = {key: result.get(key) for key in ("status", "step_ms", "peak_gib", "detail")}
            results.add(names[missing[index]], cell, shown)
    print(markdown_table(results.cells))
    plot(results.cells, results.target.with_suffix(".png"))


if __name__ == "__main__":
    main()
