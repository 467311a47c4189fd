"""Results files: their options, which cells are missing, and what every cell records beside its numbers."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import time
from pathlib import Path

import torch

from pylate_fastmaxsim.reporting.environment import versions

# When this run began. In an environment variable, so that processes started by it share the value.
RUN = "FASTMAXSIM_BENCHMARK_RUN"
os.environ.setdefault(RUN, datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"))


def processor() -> str:
    """The name of this machine's CPU, as Linux has it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def environment() -> dict:
    """Machine, versions, date and start of the run, recorded with every cell."""
    import pylate_fastmaxsim

    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "host": f"{os.cpu_count()} cores of {processor()}",
        "driver_cuda": torch.version.cuda,
        "python": platform.python_version(),
        **versions(),
        "pylate-fastmaxsim": pylate_fastmaxsim.__version__,
        "date": datetime.date.today().isoformat(),
        "run": os.environ[RUN],
    }


def write(results: Path, content: dict) -> None:
    """Replace a results file in one step, so that it is never incomplete."""
    results.parent.mkdir(parents=True, exist_ok=True)
    temporary = results.with_suffix(".tmp")
    temporary.write_text(json.dumps(content, indent=1) + "\n")
    temporary.replace(results)


# Choices of --compile and --checkpointing.
SWITCH = {"no": [False], "yes": [True], "both": [False, True]}


def add_options(parser: argparse.ArgumentParser, results: Path | None, timeout: float) -> None:
    """The options of every command whose cells are kept in a results file."""
    parser.add_argument("--results", type=Path, default=results)
    parser.add_argument("--output", type=Path, help="write here instead of over --results")
    parser.add_argument(
        "--budget", type=float, default=float("inf"), help="start no further cell after this many seconds"
    )
    parser.add_argument("--timeout", type=float, default=timeout, help="seconds a cell may take")
    parser.add_argument("--again", action="store_true", help="measure finished cells again")
    parser.add_argument("--render-only", action="store_true", help="only tables and plots of the results file")


class Results:
    """A results file: which cells are missing, and new ones, each written as soon as it is known.

    Cells are under the key ``cells``, or the file itself is the dictionary of cells (``flat``).
    """

    def __init__(self, options: argparse.Namespace, flat: bool = False) -> None:
        exists = options.results.exists()
        self.content = json.loads(options.results.read_text()) if exists else {} if flat else {"cells": {}}
        self.cells: dict[str, dict] = self.content if flat else self.content["cells"]
        self.target = options.output or options.results
        self.again = options.again
        self.ends = time.monotonic() + options.budget

    @property
    def left(self) -> float:
        """Seconds of the budget."""
        return self.ends - time.monotonic()

    def wants(self, name: str) -> bool:
        """Whether to measure a cell: it is missing, its step failed, or with ``--again``."""
        known = name in self.cells and self.cells[name].get("status") != "failed"
        return (self.again or not known) and self.left > 0

    def add(self, name: str, cell: dict, shown: object) -> None:
        """Keep a cell, and print what is shown of it."""
        self.cells[name] = cell
        print(name, shown, flush=True)
        write(self.target, self.content)
