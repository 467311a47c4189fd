"""The measuring process of one path of the losses benchmark (harness/workers.py)."""

from __future__ import annotations

import argparse
import os

import torch

import pylate_fastmaxsim
from benchmarks.harness.records import environment
from benchmarks.harness.timing import peak_bytes, time_calls
from benchmarks.harness.workers import serve
from benchmarks.losses.embedded import Step
from benchmarks.training.cell import SCORING

# Batches taken in turn, so that none finds its embeddings in the cache.
BATCHES = 6
# Calls queued at a time: some hundred launches each, of GradCache more.
AT_ONCE = {"contrastive": 4, "distillation": 4, "cached_contrastive": 1}


def run_cell(cell: dict, device: torch.device) -> dict:
    steps = [
        Step(cell["loss"], cell["queries"], cell["columns"], cell["document_length"], device, seed)
        for seed in range(BATCHES if device.type == "cuda" else 1)
    ]
    # Every batch has a model of its own, which is looked at on its first batch, and that waits for the device.
    values = [float(step()) for step in steps]
    timing = time_calls(steps, device, at_once=AT_ONCE[cell["loss"]])
    return {**timing, "peak_bytes": peak_bytes(steps[0], device), "loss_value": values[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--path", choices=list(SCORING), required=True)
    options = parser.parse_args()
    os.environ["PYLATE_SCORES_BACKEND"] = SCORING[options.path]
    if options.path == "fast":
        pylate_fastmaxsim.enable(padding_free="always")  # of Embedded, a module of our own
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    recorded = environment()
    serve(lambda cell: {**run_cell(cell, device), "environment": recorded})


if __name__ == "__main__":
    main()
