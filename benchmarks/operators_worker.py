"""The process of the operator benchmark that touches the device: reads a cell a line, answers each.

A process of its own, because an illegal access or a crash in one competitor ends every later call of its process.
"""

from __future__ import annotations

import json
import sys
import time

import torch
from operators_competitors import ENTRIES
from operators_measure import ceilings, failure, host_time, input_sets, measure_entry
from operators_shapes import BY_NAME, Shape
from train_step import environment

HOST_SHAPE = Shape("host", "host", 4, 32, 8, 32)


def run_cell(shape: Shape, competitor: str, device: torch.device) -> dict:
    torch.set_float32_matmul_precision(shape.precision)
    if competitor == "compile" and device.type == "cuda":
        free = torch.cuda.mem_get_info()[0]
        # Eagerly the einsum, its mask and its gradient are held together.
        if 3 * shape.similarity_bytes() > free:
            return {
                "failure": f"not tried: similarities of {shape.similarity_bytes() / 2**30:.0f} GiB and their gradient "
                f"do not fit in {free / 2**30:.0f} GiB"
            }
    sets = input_sets(shape, device)
    return {"entries": {entry.name: measure_entry(entry, shape, sets) for entry in ENTRIES[competitor](shape)}}


def answer(cell: dict, device: torch.device) -> dict:
    try:
        if cell["kind"] == "ceilings":
            return {"environment": environment(), "ceilings": ceilings(device)}
        if cell["kind"] == "host":
            return {"microseconds": host_time(ENTRIES["fast"](HOST_SHAPE), HOST_SHAPE, device)}
        return run_cell(BY_NAME[cell["shape"]], cell["competitor"], device)
    except Exception as error:  # noqa: BLE001 - a failure is a result of its cell
        return {"failure": failure(error)}


def usable(device: torch.device) -> bool:
    """Whether this process can go on; after an illegal access no call of it reaches the device any more."""
    if device.type == "cuda":
        try:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        except RuntimeError:
            return False
    return True


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for line in sys.stdin:
        cell = json.loads(line)
        began = time.perf_counter()
        result = answer(cell, device)
        ends = not usable(device)
        print("RESULT " + json.dumps({**result, "seconds": time.perf_counter() - began, "ends": ends}), flush=True)
        if ends:
            break


if __name__ == "__main__":
    main()
