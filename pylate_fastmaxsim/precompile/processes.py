"""Compile kernels in several processes at once, into Triton's cache on disk."""

import os
import pickle
import subprocess
import sys
import time
from collections.abc import Hashable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, groupby
from pathlib import Path

import torch

from pylate_fastmaxsim._checks import require_count
from pylate_fastmaxsim._dtypes import float32_precision
from pylate_fastmaxsim.ops.operands import has_kernels
from pylate_fastmaxsim.precompile.shapes import BatchShape, Call, calls_of

_WORKER = [sys.executable, "-m", "pylate_fastmaxsim.precompile.calls"]
# Each holds a CUDA context of half a GiB.
_MOST_PROCESSES = 16


@dataclass(frozen=True)
class Compiled:
    """Result of a warm-up: kernels that Triton's cache did not have before, processes, and seconds."""

    kernels: int
    processes: int
    seconds: float


def warmup(shapes: BatchShape | Iterable[BatchShape] | str | os.PathLike, *, processes: int | None = None) -> Compiled:
    """Compile every kernel that batches of these sizes can run, into Triton's cache on disk, in several processes.

    A first call that compiles takes seconds; after a warm-up it finds its kernels on disk, in this process and in all
    later ones on the same GPU and the same versions.

    Parameters
    ----------
    shapes
        Sizes of the batches, one or several. Or the file of a recipe: what ``fastmaxsim warmup`` compiles.
    processes
        How many processes compile. None: one for each CPU core, at most 16. Each takes half a GiB of the GPU's memory.

    Returns
    -------
    Compiled
        How many kernels are new in the cache (``kernels``), how many ``processes`` worked, and for how many ``seconds``.

    Raises
    ------
    RuntimeError
        There is no GPU that runs the kernels, or one of them cannot be compiled.
    TypeError
        ``shapes`` are something else.
    RecipeError
        The recipe is wrong, or trains without kernels here.

    Notes
    -----
    Kernels are also compiled for where tensors lie: slices of int64 tensors that begin at an odd element, for example,
    compile once more when they are first met. The kernels of sparse search are not among them; NVRTC compiles those in
    half a second.

    Examples
    --------
    >>> from pylate_fastmaxsim import BatchShape, warmup
    >>> shape = BatchShape(queries=128, query_tokens=32, documents=256, document_tokens=300)
    >>> warmup(shape)  # doctest: +SKIP
    Compiled(kernels=..., processes=16, seconds=...)
    """
    if isinstance(shapes, (str, os.PathLike)):
        from pylate_fastmaxsim.precompile.recipe import compile_recipe
        from pylate_fastmaxsim.recipes.load import load_recipe

        return compile_recipe(load_recipe(shapes), processes)
    shapes = list(shapes) if isinstance(shapes, Iterable) else [shapes]
    for shape in shapes:
        if not isinstance(shape, BatchShape):
            raise TypeError(f"warmup: shapes must be BatchShapes or the file of a recipe, got {type(shape).__name__}.")
    return compile_calls([call for shape in shapes for call in calls_of(shape)], processes)


def compile_calls(calls: Sequence[Call], processes: int | None = None) -> Compiled:
    """Compile what some calls run."""
    most = min(os.cpu_count() or 1, _MOST_PROCESSES)
    most = most if processes is None else require_count("warmup", "processes", processes)
    require_gpu()
    began, before = time.perf_counter(), cached_kernels()
    # What runs the same forward is compiled by one process.
    forwards = [tuple(same) for _, same in groupby(calls, _key_of_forward)]
    count = min(len(forwards), most)
    device, precision = torch.cuda.current_device(), float32_precision(torch.float32)
    shares = [(list(chain.from_iterable(forwards[first::count])), device, precision) for first in range(count)]
    # Not multiprocessing, which would run the user's script again.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with ThreadPoolExecutor(max(1, count)) as threads:
        workers = [subprocess.Popen(_WORKER, env=environment, **pipes) for _ in shares]
        try:
            for worker, (_, errors) in zip(
                workers, threads.map(subprocess.Popen.communicate, workers, map(pickle.dumps, shares)), strict=True
            ):
                if worker.returncode:
                    lines = errors.decode(errors="replace").strip().splitlines() or [f"status {worker.returncode}"]
                    raise RuntimeError(f"warmup: a process that compiles kernels failed: {lines[-1]}")
        finally:
            for worker in workers:
                worker.kill()
    return Compiled(cached_kernels() - before, count, time.perf_counter() - began)


def _key_of_forward(call: Call) -> Hashable:
    return call.shape, call.score, call.option, call.queries_masked, call.documents_masked, call.gradients is None


def cached_kernels() -> int:
    """Number of kernels in Triton's cache on disk."""
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
