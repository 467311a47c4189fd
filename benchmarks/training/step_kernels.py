"""The kernels of a training step, by the profiler: what each takes, and the sums of their kinds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

# The first part that occurs in a kernel's name, in lower case, says of which kind it is.
KINDS = {
    "attention": ("attention", "flash_"),
    "matrix products": ("nvjet", "gemm", "splitk", "cublas", "cutlass"),
    "optimizer": ("fusedoptimizer",),
    "MaxSim": (
        *("forward_kernel", "query_gradient", "document_gradient", "weight_gradient", "hidden_gradient"),
        *("project_kernel", "place_kernel", "radixsort"),
    ),
}
ELEMENTWISE = "element-wise"


def kind_of(name: str) -> str:
    """
    >>> kind_of("triton_poi_fused_add_8"), kind_of("nvjet_sm90_tst_192x192")
    ('element-wise', 'matrix products')
    """
    return next((kind for kind, parts in KINDS.items() if any(part in name.lower() for part in parts)), ELEMENTWISE)


def step_kernels(step: Callable[[int], object], steps: int = 4) -> dict:
    """Milliseconds of a step's kernels, of memory copies too: in all, by kind, and of the 60 largest with their number."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for index in range(steps):
            step(index)
        torch.cuda.synchronize()
    rows = [
        (event.key, event.self_device_time_total / steps / 1e3, event.count / steps)
        for event in profiler.key_averages()
    ]
    rows = sorted((row for row in rows if row[1] > 0), key=lambda row: -row[1])
    kinds: Counter[str] = Counter()
    for name, milliseconds, _ in rows:
        kinds[kind_of(name)] += milliseconds
    return {
        "kernel_ms": sum(kinds.values()),
        "launches": sum(count for *_, count in rows),
        "by_kind_ms": {kind: round(milliseconds, 3) for kind, milliseconds in kinds.most_common()},
        "kernels": [[name[:120], round(milliseconds, 4), count] for name, milliseconds, count in rows[:60]],
    }
