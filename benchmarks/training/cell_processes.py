"""Cells of training steps, a process each: several warm up at once, and they are measured one after the other.

Compiling a stock model takes minutes on the host and leaves the GPU idle, so several cells may warm up at once. Each
then waits for a line on its standard input and is measured alone. Do not warm up kernels that are autotuned in their
first steps beside others.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed

from benchmarks.harness.turns import measure_by_turns
from benchmarks.harness.workers import ask_apart, child_variables, last_error, parse_result

CELL = ["-m", "benchmarks.training.cell"]
OUT_OF_MEMORY = "out of memory"


def measure(cells: list[dict], extra: list[str], timeout: float) -> Iterator[tuple[int, dict]]:
    """Run each cell in its own process; yields its index and its result as soon as it is known.

    A failure or a timeout is a result too. A cell that runs out of memory beside others is run again alone.
    """
    warm = [threading.Event() for _ in cells]
    turn = threading.Lock()

    def run(index: int) -> tuple[int, dict]:
        try:
            return index, _run(_command(cells[index], extra), timeout, warm[index], warm, turn)
        finally:
            warm[index].set()  # the others do not wait for one that failed

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


def measure_together(cells: list[dict], extra: list[str], timeout: float) -> Iterator[tuple[int, dict]]:
    """Run cells that are compared with the first one: by turns, or as :func:`measure` does if one of them fails."""
    # A launcher does not pass a gate on to its ranks.
    if len(cells) > 1 and "--ranks" not in extra:
        names = [cell["path"] for cell in cells]
        commands = {name: [*CELL, *_options(cell, extra)] for name, cell in zip(names, cells, strict=True)}
        if results := measure_by_turns(commands, dict.fromkeys(names, {}), timeout):
            yield from enumerate(results.values())
            return
    yield from measure(cells, extra, timeout)


def _command(cell: dict, extra: list[str]) -> list[str]:
    return [sys.executable, *CELL, "--wait-for-turn", *_options(cell, extra)]


def _options(cell: dict, extra: list[str]) -> list[str]:
    command = ["--path", cell["path"], "--batch", str(cell["batch"]), *extra]
    return command + ["--compile"] * cell["compile"] + ["--checkpointing"] * cell["checkpointing"]


def _run(command: list[str], timeout: float, warm: threading.Event, all_warm: list, turn: threading.Lock) -> dict:
    """Run one process, which has ``timeout`` seconds to warm up and again as many to be measured."""
    result, late = None, threading.Event()
    with tempfile.TemporaryFile("w+") as errors:
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=errors, text=True, env=child_variables())

        def limit() -> threading.Timer:
            # Terminated, not killed: torchrun passes that on to its ranks.
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
                    with contextlib.suppress(BrokenPipeError):  # it died while it waited; reported below
                        process.stdin.write("go\n")
                        process.stdin.flush()
                else:
                    result = parse_result(line) or result
            process.wait()
            timer.cancel()
        if result is not None:
            return result
        if late.is_set():
            return {"status": f"not finished in {timeout:.0f} s"}
        errors.seek(0)
        text = errors.read()
    if "CUDA error: out of memory" in text:  # not raised by PyTorch's allocator
        return {"status": OUT_OF_MEMORY, "detail": "CUDA out of memory"}
    return {"status": "failed", "detail": last_error(text), "stderr": text[-3000:]}


def steps_together(
    command: list[str], cells: dict[str, dict], timeout: float, alone: bool
) -> Iterator[tuple[str, dict]]:
    """The results of training steps by name: of stock and fast, not compiled, by turns if both are there."""
    pair = {name: cell for name, cell in cells.items() if cell["path"] in ("stock", "fast") and not cell.get("compile")}
    together = None
    if len(pair) == 2 and not alone:
        together = measure_by_turns(dict.fromkeys(pair, command), pair, timeout)
    yield from (together or {}).items()
    for name, cell in cells.items():
        if name not in (together or {}):
            yield name, step_apart(command, cell, timeout)


def step_apart(command: list[str], cell: dict, timeout: float) -> dict:
    """The result of one training step, measured in a new process."""
    result = ask_apart(command, cell, timeout)
    if "failure" not in result:
        return result
    status = OUT_OF_MEMORY if result["failure"].startswith(OUT_OF_MEMORY) else "failed"
    return {"status": status, "detail": result["failure"]}
