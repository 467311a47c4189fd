"""Ring against gathered documents: the ranks that ``run.py --ring`` starts with torchrun, one for each GPU.

Every rank has the same number of queries and of documents, so the scores of a rank grow with the number of ranks: the
ideal time is that of 1 rank times their number. Rank 0 prints a line of JSON for each cell.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics

import torch
import torch.distributed as dist

import pylate_fastmaxsim
from benchmarks.harness.records import environment
from benchmarks.harness.timing import elapsed, mark
from benchmarks.harness.workers import failure, send_result
from benchmarks.losses.embedded import Step
from benchmarks.losses.table import RING_PATHS
from pylate_fastmaxsim.ops.distributed import ring as distributed_ring

WARM_UP = 5


def measure(step: Step, device: torch.device, iterations: int) -> dict:
    """Median over the steps, of the slowest rank. Nothing waits between steps."""
    cuda = device.type == "cuda"
    for _ in range(WARM_UP if cuda else 1):
        step()
    if cuda:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    dist.barrier()
    gc.collect()
    marks = [mark(cuda)]
    for _ in range(iterations):
        step()
        marks.append(mark(cuda))
    if cuda:
        torch.cuda.synchronize()
    times = [elapsed(*pair) * 1e3 for pair in zip(marks, marks[1:], strict=False)]
    peak = torch.cuda.max_memory_allocated() - before if cuda else 0
    slowest = torch.tensor([statistics.median(times), peak], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    milliseconds, peak = slowest.tolist()
    return {"ms": milliseconds, "peak_bytes": int(peak) if cuda else None, "iterations": iterations}


def run_cell(cell: dict, device: torch.device, iterations: int) -> dict:
    in_ring, kept = RING_PATHS[cell["path"]]
    default = distributed_ring.KEPT_STATE_BYTES
    distributed_ring.KEPT_STATE_BYTES = default if kept is None else kept
    try:
        with pylate_fastmaxsim.enabled(ring=in_ring, padding_free="always"):  # as in cell.py
            step = Step(
                cell["loss"],
                cell["queries"],
                cell["columns"],
                cell["document_length"],
                device,
                seed=dist.get_rank(),
                float32=False,
                gather_across_devices=cell["path"] != "local",
            )
            return measure(step, device, iterations)
    except torch.OutOfMemoryError as error:
        return {"failure": failure(error)}
    finally:
        distributed_ring.KEPT_STATE_BYTES = default


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cells", type=json.loads, required=True, help="what to measure, a list of cells in JSON")
    parser.add_argument("--iterations", type=int, default=20)
    options = parser.parse_args()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    recorded = environment()
    for cell in options.cells:
        result = run_cell(cell, device, options.iterations)
        if dist.get_rank() == 0:
            send_result({**result, "environment": recorded})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
