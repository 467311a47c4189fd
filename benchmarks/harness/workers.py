"""Measuring processes: each reads one cell a line from its standard input, as JSON, and answers with one line.

They are apart from the command because an illegal memory access in one competitor makes every later CUDA call of its
process fail, and because nothing that one leaves in memory or in settings may reach the next.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from functools import partial

import torch

from benchmarks.harness.paths import ROOT

_ANSWER = "RESULT "


def child_variables() -> dict[str, str]:
    """The environment of a measuring process, which imports this checkout."""
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def last_error(text: str) -> str:
    """The line that names the error of a process that ended; frames of the stack may follow it."""
    lines = text.strip().splitlines()
    errors = [line for line in lines if re.search(r"\w(Error|Exception)\b|CUDA error", line)]
    return (errors or lines or ["no output"])[-1].strip()[:500]


def failure(error: Exception) -> str:
    """Why a cell failed, in one line."""
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory: " + str(error).split(". ")[0]
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:300]}"


def or_failure(call: Callable[[], dict]) -> dict:
    """What a call returns, or why it failed: competitors raise all kinds of errors."""
    try:
        return call()
    except Exception as error:  # noqa: BLE001
        traceback.print_exc()
        return {"failure": failure(error)}


def serve(answer: Callable[[dict], dict]) -> None:
    """Answer every cell from the standard input, until CUDA calls of this process fail.

    Whatever ``answer`` raises is the result of its cell: competitors raise all kinds of errors.
    """
    for line in sys.stdin:
        result = or_failure(partial(answer, json.loads(line)))
        ends = not _usable()
        print(_ANSWER + json.dumps({**result, "ends": ends}), flush=True)
        if ends:
            break


def _usable() -> bool:
    """Whether CUDA calls still work; after an illegal memory access every one fails."""
    if torch.cuda.is_available():
        try:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        except RuntimeError:
            return False
    return True


class Worker:
    """The measuring process of a command, started with the first cell and again after it ended.

    It has ``timeout`` seconds for each answer.
    """

    GRACE = 10.0  # seconds to end after its input is closed

    def __init__(self, command: list[str], timeout: float) -> None:
        self.command = [sys.executable, *command]
        self.timeout = timeout
        self.process: subprocess.Popen | None = None
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - lives as long as the worker

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(self.GRACE)
            self._kill()  # it may still be measuring
            self.process.wait()

    def ask(self, cell: dict) -> dict:
        """The answer to a cell; a failure or a timeout is an answer too."""
        if self.process is None or self.process.poll() is not None:
            self.start()
        try:
            self.process.stdin.write(json.dumps(cell) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:  # it ended; `answer` finds out why
            pass
        return self.answer()

    def start(self) -> None:
        """Start the process; needed only where it answers without being asked."""
        self.errors.seek(0)
        self.errors.truncate()
        self.process = subprocess.Popen(
            self.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            env=child_variables(),
            start_new_session=True,
        )

    def answer(self) -> dict:
        """The next answer of the process."""
        late = threading.Event()
        timer = threading.Timer(self.timeout, lambda: (late.set(), self._kill()))
        timer.start()
        try:
            for line in self.process.stdout:
                if line.startswith(_ANSWER):
                    result = json.loads(line.removeprefix(_ANSWER))
                    if result.pop("ends", False):
                        self.process.wait()
                    return result
            self.process.wait()
        except BaseException:
            self._kill()
            raise
        finally:
            timer.cancel()
        if late.is_set():
            return {"failure": f"not finished in {self.timeout:g} s"}
        self.errors.seek(0)
        return {"failure": f"the process ended with status {self.process.returncode}: {last_error(self.errors.read())}"}

    def _kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)  # with compiler processes, which keep its output open


def ask_apart(command: list[str], cell: dict, timeout: float) -> dict:
    """The answer to one cell from a new process."""
    with Worker(command, timeout) as worker:
        return worker.ask(cell)
