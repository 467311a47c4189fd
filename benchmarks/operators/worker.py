"""The measuring process of the operator benchmark (see harness/workers.py)."""

from __future__ import annotations

import time

import torch

from benchmarks.harness.records import environment
from benchmarks.harness.workers import serve
from benchmarks.operators.competitors import ENTRIES
from benchmarks.operators.measure import ceilings, host_time, input_sets, measure_entry
from benchmarks.operators.shapes import BY_NAME, Shape

HOST_SHAPE = Shape("host", "host", 4, 32, 8, 32)


def run_cell(shape: Shape, competitor: str, device: torch.device) -> dict:
    torch.set_float32_matmul_precision(shape.precision)
    if competitor == "compile" and device.type == "cuda":
        free = torch.cuda.mem_get_info()[0]
        # Eager einsum holds the similarities, their masked copy and their gradient together.
        if 3 * shape.similarity_bytes() > free:
            return {
                "failure": f"not tried: similarities of {shape.similarity_bytes() / 2**30:.0f} GiB and their gradient "
                f"do not fit in {free / 2**30:.0f} GiB"
            }
    sets = input_sets(shape, device)
    return {"entries": {entry.name: measure_entry(entry, shape, sets) for entry in ENTRIES[competitor](shape)}}


def answer(cell: dict, device: torch.device) -> dict:
    began = time.perf_counter()
    if cell["kind"] == "ceilings":
        result = {"environment": environment(), "ceilings": ceilings(device)}
    elif cell["kind"] == "host":
        result = {"microseconds": host_time(ENTRIES["fast"](HOST_SHAPE), HOST_SHAPE, device)}
    else:
        result = run_cell(BY_NAME[cell["shape"]], cell["competitor"], device)
    return {**result, "seconds": time.perf_counter() - began}


if __name__ == "__main__":
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    serve(lambda cell: answer(cell, device))
