"""Cells of the training-step benchmark in processes that warm up side by side, and are measured one after the other.

To compile a stock model takes minutes of the host and leaves the GPU idle. So several cells may warm up at the same
time; each then waits for a line on its standard input, and has the GPU and the host to itself while it is measured.
What chooses kernels by timing them in its first steps does so beside the others, so measure kernels one at a time.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed

from benchmarks.harness.workers import ask_apart, child_variables, last_error, said

CELL = ["-m", "benchmarks.training.cell"]
OUT_OF_MEMORY = "out of memory"


def measure(cells: list[dict], extra: list[str], timeout: float) -> Iterator[tuple[int, dict]]:
    """Run each cell in its own process; its place in the list and its result, as soon as that is known.

    A cell that fails or runs too long is a result as well. One that runs out of memory beside others is run once more
    without them.
    """
    warm = [threading.Event() for _ in cells]
    turn = threading.Lock()

    def run(index: int) -> tuple[int, dict]:
        try:
            return index, _run(_command(cells[index], extra), timeout, warm[index], warm, turn)
        finally:
            warm[index].set()  # nobody waits for one that failed before it was warm

    alone = []
    with ThreadPoolExecutor(len(cells)) as pool:
        for done in as_completed([pool.submit(run, index) for index in range(len(cells))]):
            index, result = done.result()
            if result["status"] == OUT_OF_MEMORY and len(cells) > 1:
                alone.append(index)
            else:
                yield index, result
    for index in alone:
        for _, result in measure([cells[index]], extra, timeout):
            yield index, result


def _command(cell: dict, extra: list[str]) -> list[str]:
    command = [sys.executable, *CELL, "--wait-for-turn"]
    command += ["--path", cell["path"], "--batch", str(cell["batch"]), *extra]
    return command + ["--compile"] * cell["compile"] + ["--checkpointing"] * cell["checkpointing"]


def _run(command: list[str], timeout: float, warm: threading.Event, all_warm: list, turn: threading.Lock) -> dict:
    """Run one process, which has `timeout` seconds to warm up and as many to be measured."""
    result, late = None, threading.Event()
    with tempfile.TemporaryFile("w+") as errors:
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=errors, text=True, env=child_variables())

        def limit() -> threading.Timer:
            # Not killed: a launcher of several ranks passes this on to them.
            timer = threading.Timer(timeout, lambda: (late.set(), process.terminate()))
            timer.daemon = True
            timer.start()
            return timer

        timer = limit()
        with contextlib.ExitStack() as stack:
            for line in process.stdout:
                if line == "READY\n":
                    timer.cancel()
                    warm.set()
                    for other in all_warm:
                        other.wait()
                    stack.enter_context(turn)
                    timer = limit()
                    with contextlib.suppress(BrokenPipeError):  # it died while it waited, and says so below
                        process.stdin.write("go\n")
                        process.stdin.flush()
                else:
                    result = said(line) or result
            process.wait()
            timer.cancel()
        if result is not None:
            return result
        if late.is_set():
            return {"status": f"not finished in {timeout:.0f} s"}
        errors.seek(0)
        text = errors.read()
    if "CUDA error: out of memory" in text:  # where PyTorch's allocator was not the one that asked
        return {"status": OUT_OF_MEMORY, "detail": "CUDA out of memory"}
    return {"status": "failed", "detail": last_error(text), "stderr": text[-3000:]}


def step_apart(command: list[str], cell: dict, timeout: float) -> dict:
    """The result of a cell of a benchmark of steps, measured in a process of its own."""
    result = ask_apart(command, cell, timeout)
    if "failure" not in result:
        return result
    status = OUT_OF_MEMORY if result["failure"].startswith(OUT_OF_MEMORY) else "failed"
    return {"status": status, "detail": result["failure"]}
