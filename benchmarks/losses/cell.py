"""The measuring process of one path of the losses benchmark (see harness/workers.py)."""

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

# Taken in turn, so that no batch finds its embeddings in the cache.
BATCHES = 6
# Calls to queue at once: about a hundred launches each, more with GradCache.
AT_ONCE = {"contrastive": 4, "distillation": 4, "cached_contrastive": 1}


def run_cell(cell: dict, device: torch.device) -> dict:
    steps = [
        Step(cell["loss"], cell["queries"], cell["columns"], cell["document_length"], device, seed)
        for seed in range(BATCHES if device.type == "cuda" else 1)
    ]
    # The first call of each model decides how it is encoded, and waits for the device.
    values = [float(step()) for step in steps]
    timing = time_calls(steps, device, at_once=AT_ONCE[cell["loss"]])
    return {**timing, "peak_bytes": peak_bytes(steps[0], device), "loss_value": values[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--path", choices=list(SCORING), required=True)
    options = parser.parse_args()
    os.environ["PYLATE_SCORES_BACKEND"] = SCORING[options.path]
    if options.path == "fast":
        pylate_fastmaxsim.enable(padding_free="always")  # Embedded is not a known encoder
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    recorded = environment()
    serve(lambda cell: {**run_cell(cell, device), "environment": recorded})


if __name__ == "__main__":
    main()
