"""Full training steps of ModernBERT-base: stock PyLate, PyLate with each fused-kernel peer, and this package.

    python -m benchmarks.training.train_step                       # measure what is missing, then print the table
    python -m benchmarks.training.train_step --render-only         # table and plot from the committed results

A step is forward, contrastive loss, backward and AdamW in bf16 autocast, with one negative per query. Options that are
not listed here, such as --loss, are those of cell.py (`python -m benchmarks.training.cell --help`). Each cell runs in a
process of its own, which has --timeout seconds to warm up and again as many to be measured. Stock and fast of a batch,
not compiled, take turns with their steps, unless --alone. It is written to the
results file as soon as it is known, and a finished one is not measured again, so several short runs on a GPU fill one
file.
"""

from __future__ import annotations

import argparse
import itertools

from benchmarks.harness.paths import RESULTS
from benchmarks.harness.records import SWITCH, Results, add_options, environment
from benchmarks.harness.tables import table
from benchmarks.harness.turns import add_alone, speed
from benchmarks.training.cell_processes import OUT_OF_MEMORY, measure, measure_together

PATHS = {
    "stock": "PyLate",
    "lik": "PyLate + late-interaction-kernels",
    "flash": "PyLate + flash-maxsim",
    "fast": "PyLate + pylate-fastmaxsim",
}


def cell_name(path: str, batch: int, compiled: bool, checkpointing: bool) -> str:
    return f"{path}/batch={batch}/compile={int(compiled)}/checkpointing={int(checkpointing)}"


def mark_of_runs(cell: dict, other: dict) -> str:
    """‡ where the cells are of two runs, or, without the time of their run, of two days or machines."""
    keys = ("run", "date", "device", "host")
    return "" if all(cell["environment"].get(key) == other["environment"].get(key) for key in keys) else "‡"


def row_title(path: str, compiled: bool) -> str:
    if not compiled:
        return PATHS[path]
    return PATHS[path] + (", `compile=True`" if path == "fast" else " + torch.compile")


def time_and_memory(cell: dict) -> str:
    """Time and memory of a step, or why there are none; † marks times of the host's clock, without memory."""
    if cell["status"] != "ok":
        return cell["status"]
    text = f"{cell['step_ms']:,.0f} ms{'' if cell['timing'] == 'CUDA events' else '†'}"
    return text + ("" if cell["peak_gib"] is None else f", {cell['peak_gib']:.1f} GiB")


def markdown_table(cells: dict, checkpointing: bool) -> str:
    """Step time and peak memory by path and batch, with the ratio to stock of the same batch; ‡ compares two runs.

    A cell that was not measured is out of memory where a smaller batch of its row was.
    """
    keys = [cell["cell"] for cell in cells.values() if cell["cell"]["checkpointing"] == checkpointing]
    batches = sorted({key["batch"] for key in keys})
    lines = []
    for compiled, path in itertools.product([False, True], PATHS):
        entries = []
        for batch in batches:
            cell = cells.get(cell_name(path, batch, compiled, checkpointing))
            stock = cells.get(cell_name("stock", batch, False, checkpointing))
            if cell is None:
                smaller = (cells.get(cell_name(path, b, compiled, checkpointing), {}) for b in batches if b < batch)
                failed = any(other.get("status") == OUT_OF_MEMORY for other in smaller)
                entries.append(OUT_OF_MEMORY if failed else "")
            else:
                text = time_and_memory(cell)
                if stock and stock["status"] == cell["status"] == "ok" and cell is not stock:
                    text += f" ({speed(cell, stock)}{mark_of_runs(cell, stock)})"
                entries.append(text)
        if any(entries):
            lines.append([row_title(path, compiled), *entries])
    return table(["path", *(f"batch {batch}" for batch in batches)], lines)


def compared(names: list[str], cells: dict[str, dict]) -> list[list[str]]:
    """Cells that take turns: stock and fast of a batch, not compiled."""
    pairs = []
    for name in names:
        cell = cells[name]
        fast = cell_name("fast", cell["batch"], False, cell["checkpointing"])
        if cell["path"] == "stock" and not cell["compile"] and fast in names:
            pairs.append([name, fast])
    return pairs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, RESULTS / "train_step.json", timeout=240)
    add_alone(parser)
    parser.add_argument("--batches", type=int, nargs="+", default=[32, 64, 128, 256, 512, 1024])
    parser.add_argument("--paths", nargs="+", choices=list(PATHS), default=list(PATHS))
    parser.add_argument("--compile", choices=list(SWITCH), default="both")
    parser.add_argument("--checkpointing", choices=list(SWITCH), default="both")
    parser.add_argument("--together", type=int, default=1, help="cells that warm up at once; each is measured alone")
    options, extra = parser.parse_known_args()
    if options.together < 1:
        parser.error("--together must be at least 1")
    results = Results(options)
    if not options.render_only:
        recorded = environment()
        choices = itertools.product(
            SWITCH[options.checkpointing], SWITCH[options.compile], options.batches, options.paths
        )
        cells = {
            cell_name(path, batch, compiled, checkpointing): {
                "path": path,
                "batch": batch,
                "compile": compiled,
                "checkpointing": checkpointing,
            }
            for checkpointing, compiled, batch, path in choices
        }
        names = list(filter(results.wants, cells))
        pairs = [] if options.alone else compared(names, cells)
        others = [name for name in names if not any(name in pair for pair in pairs)]
        parted = [others[first : first + options.together] for first in range(0, len(others), options.together)]
        for group in [*pairs, *parted]:
            if results.left <= 0:
                break
            chosen = [cells[name] for name in group]
            run = measure_together if group in pairs else measure
            for index, result in run(chosen, extra, options.timeout):
                cell = {"cell": cells[group[index]], "options": extra, **result, "environment": recorded}
                shown = {key: value for key, value in result.items() if key not in ("losses", "each_ms", "stderr")}
                results.add(group[index], cell, shown)
    from benchmarks.training.plots import plot

    rows = {path: {compiled: row_title(path, compiled) for compiled in (False, True)} for path in PATHS}
    for checkpointing, ending in ((False, ".png"), (True, "_checkpointing.png")):
        if any(cell["cell"]["checkpointing"] == checkpointing for cell in results.cells.values()):
            print(f"\nGradient checkpointing: {'on' if checkpointing else 'off'}\n")
            print(markdown_table(results.cells, checkpointing))
            plot(results.cells, rows, results.target.with_name(results.target.stem + ending), checkpointing)


if __name__ == "__main__":
    main()
