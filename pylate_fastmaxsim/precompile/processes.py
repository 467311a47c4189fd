"""Compile the kernels of calls in several processes at once, into Triton's cache on disk."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from collections.abc import Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, groupby
from pathlib import Path

import torch

from pylate_fastmaxsim._checks import require_count
from pylate_fastmaxsim._dtypes import float32_precision
from pylate_fastmaxsim.ops.dispatch import has_kernels
from pylate_fastmaxsim.precompile.shapes import Call

_WORKER = [sys.executable, "-m", "pylate_fastmaxsim.precompile.worker"]
# Each holds a CUDA context of half a GiB.
_MOST_PROCESSES = 16


@dataclass(frozen=True)
class Compiled:
    """What a warm-up did: kernels that Triton's cache did not have before, processes, and seconds."""

    kernels: int
    processes: int
    seconds: float


@dataclass(frozen=True)
class Share:
    """What a process compiles, and how."""

    calls: tuple[Call, ...]
    device: int
    float32_precision: str


class Compiling:
    """Processes that compile what some calls run, from the beginning of a ``with`` block on.

    Raises
    ------
    RuntimeError
        There is no GPU that runs the kernels.
    """

    def __init__(self, calls: Sequence[Call], processes: int | None = None) -> None:
        most = min(os.cpu_count() or 1, _MOST_PROCESSES)
        most = most if processes is None else require_count("warmup", "processes", processes)
        require_gpu()
        # What runs the same forward is compiled by one process.
        forwards = [tuple(same) for _, same in groupby(calls, _forward)]
        count = min(len(forwards), most)
        device, precision = torch.cuda.current_device(), float32_precision(torch.float32)
        self._shares = [
            Share(tuple(chain.from_iterable(forwards[first::count])), device, precision) for first in range(count)
        ]
        self._processes: list[subprocess.Popen] = []

    def __enter__(self) -> Compiling:
        self._began, self._before = time.perf_counter(), cached_kernels()
        # Not multiprocessing, which would run the user's script again.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        self._processes = [subprocess.Popen(_WORKER, env=environment, **pipes) for _ in self._shares]
        self._threads = ThreadPoolExecutor(max(1, len(self._shares)))
        self._done = [
            self._threads.submit(process.communicate, pickle.dumps(share))
            for process, share in zip(self._processes, self._shares, strict=True)
        ]
        return self

    def __exit__(self, *_) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()
        self._threads.shutdown()

    def result(self) -> Compiled:
        """Wait until everything is compiled.

        Raises
        ------
        RuntimeError
            A call fails.
        """
        for process, done in zip(self._processes, self._done, strict=True):
            _, errors = done.result()
            if process.returncode:
                lines = errors.decode(errors="replace").strip().splitlines() or [f"status {process.returncode}"]
                raise RuntimeError(f"warmup: a process that compiles kernels failed: {lines[-1]}")
        return Compiled(cached_kernels() - self._before, len(self._processes), time.perf_counter() - self._began)


def _forward(call: Call) -> Hashable:
    return call.shape, call.score, call.option, call.queries_masked, call.documents_masked, call.gradients is None


def cached_kernels() -> int:
    """How many kernels Triton's cache on disk holds."""
    root = os.environ.get("TRITON_CACHE_DIR") or Path(os.environ.get("TRITON_HOME") or Path.home(), ".triton", "cache")
    return sum(1 for _ in Path(root).glob("*/*.cubin"))


def require_gpu() -> None:
    """Raise RuntimeError unless kernels can be compiled here."""
    if not torch.cuda.is_available():
        raise RuntimeError(
            "warmup: kernels are compiled for the GPU that will run them, and PyTorch finds no CUDA GPU here."
        )
    if not has_kernels(torch.device("cuda", torch.cuda.current_device())):
        raise RuntimeError("warmup: the kernels do not run here, so there is nothing to compile; the log says why.")
