"""PyLate's losses: stock, with each fused-kernel peer, and with this package; and the largest batch.

    python -m benchmarks.losses.run                           # measure what is missing, then print the tables
    python -m benchmarks.losses.run --render-only             # tables from the committed results
    python -m benchmarks.losses.run --ceiling --losses contrastive --budget 300
    python -m benchmarks.losses.run --queries 4 --lengths 12 --paths stock fast --results /tmp/losses.json    # on a CPU

Without --ceiling, a cell is forward + backward of one loss on stored token embeddings in bf16 autocast: what
a training step does without the encoder. Each is written to the results file as soon as it is known, and a finished
one is not measured again, so several short runs on a GPU fill one file.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterable, Iterator

from benchmarks.harness.paths import RESULTS
from benchmarks.harness.records import Results, add_options, environment
from benchmarks.harness.workers import Worker
from benchmarks.losses.ceiling import GRID, next_batch, try_batch
from benchmarks.losses.table import LOSS_TITLES, markdown
from benchmarks.training.train_step import PATHS

# Documents per query. Distillation has fewer queries, so that the number of documents is the same.
COLUMNS = {"contrastive": 2, "cached_contrastive": 2, "distillation": 16}


def embedded_cells(options: argparse.Namespace) -> Iterator[dict]:
    for path, loss, length in itertools.product(options.paths, options.losses, options.lengths):
        queries = options.queries * 2 // COLUMNS[loss] or 1
        yield {
            "kind": "embedded",
            "path": path,
            "loss": loss,
            "queries": queries,
            "columns": COLUMNS[loss],
            "document_length": length,
        }


def name_of(cell: dict) -> str:
    return "/".join(f"{key}={value}" if key != "kind" else value for key, value in cell.items())


def wanted(results: Results, cells: Iterable[dict]) -> Iterator[dict]:
    return (cell for cell in cells if results.wants(name_of(cell)))


def keep(results: Results, cell: dict, result: dict) -> None:
    hidden = ("environment", "stderr", "losses", "each_ms")
    results.add(name_of(cell), {"cell": cell, **result}, {k: v for k, v in result.items() if k not in hidden})


def measure_embedded(options: argparse.Namespace, results: Results) -> None:
    for path, cells in itertools.groupby(embedded_cells(options), lambda cell: cell["path"]):
        command = ["-m", "benchmarks.losses.cell", "--path", path]
        with Worker(command, options.timeout) as worker:
            for cell in wanted(results, cells):
                keep(results, cell, worker.ask(cell))


def measure_ceilings(options: argparse.Namespace, results: Results) -> None:
    import torch

    capacity = torch.cuda.get_device_properties(0).total_memory / 2**30 if torch.cuda.is_available() else None
    recorded = environment()
    losses = [loss for loss in options.losses if loss != "distillation"]
    for loss, path in itertools.product(losses, options.paths):
        # With --chunks only scoring is measured, which does not depend on compilation.
        for compiled in [False, True] if path == "fast" and options.chunks is None else [False]:
            layers = options.layers
            group = {"kind": "ceiling", "loss": loss, "layers": layers, "path": path, "compile": compiled}
            group |= {"chunks": options.chunks} if options.chunks is not None else {}
            while results.left > 0:
                tried = {
                    cell["cell"]["batch"]: cell
                    for cell in results.cells.values()
                    if cell["cell"] == {**group, "batch": cell["cell"].get("batch")}
                }
                batch = next_batch(tried, options.first, capacity, options.largest)
                if batch is None:
                    break
                timeout = min(options.timeout, results.left)
                result = try_batch(loss, path, compiled, batch, layers, options.chunks, timeout)
                if result["status"].startswith("not finished") and timeout < options.timeout:
                    return  # the budget ended, which says nothing about the batch
                keep(results, {**group, "batch": batch}, {**result, "environment": recorded})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, RESULTS / "losses.json", timeout=120)
    parser.add_argument("--ceiling", action="store_true", help="the largest batch that each path trains")
    parser.add_argument("--paths", nargs="+", choices=list(PATHS), default=list(PATHS))
    parser.add_argument("--losses", nargs="+", choices=list(LOSS_TITLES), default=list(LOSS_TITLES))
    parser.add_argument("--lengths", type=int, nargs="+", default=[180, 300], help="of documents")
    parser.add_argument("--queries", type=int, default=256, help="queries of a batch (of distillation an eighth)")
    parser.add_argument("--layers", type=int, help="with --ceiling: fewer encoder layers than ModernBERT-base has")
    parser.add_argument("--first", type=int, choices=GRID, default=128, help="with --ceiling: batch to try first")
    parser.add_argument("--largest", type=int, default=GRID[-1], help="with --ceiling: try no larger batch")
    parser.add_argument(
        "--chunks", type=int, help="with --ceiling and GradCache: only the memory of this many chunks of scores"
    )
    options = parser.parse_args()
    if options.chunks is not None and (options.paths, options.losses) != (["fast"], ["cached_contrastive"]):
        parser.error("--chunks goes with --paths fast and --losses cached_contrastive")
    results = Results(options)
    if not options.render_only:
        measure = measure_ceilings if options.ceiling else measure_embedded
        measure(options, results)
    print("\n" + markdown(results.content))
    from benchmarks.losses.plots import plot_all  # last: measuring and the tables do not need matplotlib

    plot_all(results.content, results.target)


if __name__ == "__main__":
    main()
