"""PyLate's losses without the encoder: stock, with each fused-kernel peer, and with this package.

    python -m benchmarks losses                           # measure what is missing, then print the table
    python -m benchmarks losses --queries 4 --lengths 12 --paths stock fast --results /tmp/losses.json    # on a CPU

A cell is forward + backward of one loss on stored token embeddings in bf16 autocast. The cells of a path are measured by
one process.
"""

from __future__ import annotations

import argparse
import itertools
import os

from benchmarks.harness.timing import DEVICE, peak_bytes, time_calls
from benchmarks.training.train_step import PATHS, SCORING

PROCESS_OF = ("path",)
# As PyLate names the classes.
TITLES = {
    "contrastive": "Contrastive",
    "cached_contrastive": "CachedContrastive",
    "distillation": "Distillation",
}
# Documents per query. Distillation has fewer queries, so that the number of documents is the same.
COLUMNS = {"contrastive": 2, "cached_contrastive": 2, "distillation": 16}
# Taken in turn, so that no batch finds its embeddings in the cache.
BATCHES = 6
# Calls to queue at once: about a hundred launches each, more with GradCache.
AT_ONCE = {"contrastive": 4, "distillation": 4, "cached_contrastive": 1}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--paths", nargs="+", choices=list(PATHS), default=list(PATHS))
    parser.add_argument("--losses", nargs="+", choices=list(TITLES), default=list(TITLES))
    parser.add_argument("--lengths", type=int, nargs="+", default=[180, 300], help="of documents")
    parser.add_argument("--queries", type=int, default=256, help="queries of a batch (of distillation an eighth)")


def cells(options: argparse.Namespace) -> dict[str, dict]:
    made = {}
    for path, loss, length in itertools.product(options.paths, options.losses, options.lengths):
        columns = COLUMNS[loss]
        queries = options.queries * 2 // columns or 1
        cell = {"path": path, "loss": loss, "queries": queries, "columns": columns, "document_length": length}
        made["/".join(f"{key}={value}" for key, value in cell.items())] = cell
    return made


def measure(cell: dict) -> dict:
    os.environ["PYLATE_SCORES_BACKEND"] = SCORING[cell["path"]]
    import pylate_fastmaxsim
    from benchmarks.training.embedded import Step

    if cell["path"] == "fast":
        pylate_fastmaxsim.enable(padding_free="always")  # Embedded is not a known encoder
    steps = [
        Step(cell["loss"], cell["queries"], cell["columns"], cell["document_length"], seed)
        for seed in range(BATCHES if DEVICE.type == "cuda" else 1)
    ]
    # The first call of each model decides how it is encoded, and waits for the device.
    values = [float(step()) for step in steps]
    timing = time_calls(steps, at_once=AT_ONCE[cell["loss"]])
    return {**timing, "peak_bytes": peak_bytes(steps[0]), "loss_value": values[0]}
