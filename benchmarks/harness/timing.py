"""Time and memory: of single calls, and between points of a run of steps."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from itertools import cycle, islice, pairwise

import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ITERATIONS = 25
WARM_UP = 3
SLEEP_LIMIT = 0.3  # seconds
SLOW = 0.3  # seconds of a call that is timed three times, without further warm-up


def time_calls(calls: list[Callable[[], object]], device: torch.device = DEVICE, at_once: int = ITERATIONS) -> dict:
    """Median milliseconds of the calls, taken in turn, on a device that never waits for the host.

    ``at_once`` calls are queued while the device idles, and once more if the host took longer than that. The queue holds
    about 1,000 launches; with more of them the host waits for the device, and then the device for the host.

    ``host_ms`` is the host's time to queue one call. Where it exceeds ``ms``, a program that makes only this call is
    bound by the host. ``ms`` includes any wait for the device inside the call.
    """
    turns = cycle(calls)
    cuda = device.type == "cuda"
    for made in range(WARM_UP + 1):
        if cuda:
            torch.cuda.synchronize()
        began = time.perf_counter()
        next(turns)()
        host = time.perf_counter() - began
        if cuda:
            torch.cuda.synchronize()
        once = time.perf_counter() - began
        if made and once > SLOW:
            break
    iterations = 3 if once > SLOW else max(5, min(ITERATIONS, int(2 / once)))
    gc.collect()
    gc.disable()
    try:
        if not cuda:
            times = []
            for call in islice(turns, iterations):
                began = time.perf_counter()
                call()
                times.append((time.perf_counter() - began) * 1e3)
            return {"ms": statistics.median(times), "host_ms": None, "iterations": iterations}
        times, host_times = [], []
        while len(times) < iterations:
            count = min(at_once, iterations - len(times))
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
            # The device idles while the host fills its queue (about 2e9 cycles a second).
            idle = min(SLEEP_LIMIT, 1e-3 + 1.5 * count * host)
            torch.cuda._sleep(int(2e9 * idle))
            marks[0].record()
            queued = [time.perf_counter()]
            for mark, call in zip(marks[1:], turns, strict=False):
                call()
                mark.record()
                queued.append(time.perf_counter())
            torch.cuda.synchronize()
            if queued[-1] - queued[0] > idle < SLEEP_LIMIT:
                host = (queued[-1] - queued[0]) / count
                continue
            host_times += [(end - start) * 1e3 for start, end in pairwise(queued)]
            times += [start.elapsed_time(end) for start, end in zip(marks, marks[1:], strict=False)]
    finally:
        gc.enable()
    return {
        "ms": statistics.median(times),
        "ms_min": min(times),
        "ms_max": max(times),
        "host_ms": statistics.median(host_times),
        "iterations": iterations,
    }


def peak_bytes(call: Callable[[], object], device: torch.device = DEVICE) -> int | None:
    """Peak memory of one call beyond what was allocated before it."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    kept = call()
    torch.cuda.synchronize()
    del kept
    return torch.cuda.max_memory_allocated() - before


def device_ms(call: Callable[[], object]) -> float | None:
    """Milliseconds that kernels of one call take, without what lies between them."""
    if DEVICE.type != "cuda":
        return None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
        call()
        torch.cuda.synchronize()
    return sum(event.self_device_time_total for event in profiled.key_averages()) / 1e3


def seconds_of(call: Callable[[], object], repeats: int = 1, device: torch.device = DEVICE) -> tuple[dict, object]:
    """Seconds, and peak memory beyond what was allocated before, of a call; and what it returned last."""
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    each = []
    for _ in range(repeats):
        began = time.perf_counter()
        result = call()
        if cuda:
            torch.cuda.synchronize()
        each.append(time.perf_counter() - began)
    peak = torch.cuda.max_memory_allocated() - before if cuda else None
    return {"seconds": statistics.median(each), "each_seconds": each, "peak_bytes": peak}, result


def mark(cuda: bool) -> torch.cuda.Event | float:
    """A point in the device's time."""
    if not cuda:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def elapsed(start: torch.cuda.Event | float, end: torch.cuda.Event | float) -> float:
    """Seconds between two marks."""
    return end - start if isinstance(start, float) else start.elapsed_time(end) / 1e3


def peaks_gib() -> list[float]:
    """Peak GiB of tensors, and of what PyTorch's allocator reserved (more, where memory is fragmented)."""
    return [torch.cuda.max_memory_allocated() / 2**30, torch.cuda.max_memory_reserved() / 2**30]
