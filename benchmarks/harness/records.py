"""Results files: their format, which cells are missing, and the machine and versions of every cell."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import json
import math
import os
import platform
import time
from pathlib import Path

from benchmarks.harness.timing import DEVICE
from pylate_fastmaxsim.files.replace import replace_file
from pylate_fastmaxsim.reporting.environment import environment as machine_and_versions

# When this run began. In an environment variable, so that processes started by it share the value.
RUN = "FASTMAXSIM_BENCHMARK_RUN"
os.environ.setdefault(RUN, datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"))

# Significant digits of a number in a results file: enough for every table. Losses keep all of theirs.
DIGITS = 6


def processor() -> str:
    """The name of this machine's CPU, as Linux has it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


@functools.cache
def environment() -> dict:
    """Machine, versions, date and start of the run."""
    return {
        **machine_and_versions(DEVICE),
        "host": f"{os.cpu_count()} cores of {processor()}",
        "date": datetime.date.today().isoformat(),
        "run": os.environ[RUN],
    }


def load(file: Path) -> dict:
    """A results file, each record with its whole ``environment``."""
    text = file.read_text()
    environments = json.loads(text).get("environments", [])

    def whole(found: dict) -> dict:
        if isinstance(found.get("environment"), int):
            found["environment"] = environments[found["environment"]]
        return found

    content = json.loads(text, object_hook=whole)
    content.pop("environments", None)
    return content


def write(file: Path, content: dict) -> None:
    """Replace a results file: every environment once, numbers of six digits, a cell a line."""
    environments: list[dict] = []

    def short(value: object) -> object:
        if isinstance(value, float) and math.isfinite(value):
            return float(f"{value:.{DIGITS}g}")
        if isinstance(value, list):
            return [short(each) for each in value]
        if not isinstance(value, dict):
            return value
        keep = {"environment": place, "losses": lambda whole: whole}
        return {key: keep.get(key, short)(each) for key, each in value.items()}

    def place(recorded: dict) -> int:
        if recorded not in environments:
            environments.append(recorded)
        return environments.index(recorded)

    content = short(content)
    file.parent.mkdir(parents=True, exist_ok=True)
    replace_file(file, _lines({"environments": environments, **content}).encode())


def _lines(content: dict, depth: int = 0) -> str:
    if depth == 2 or not isinstance(content, dict) or not content:
        return json.dumps(content)
    indent = " " * (depth + 1)
    rows = ",\n".join(f"{indent}{json.dumps(key)}: {_lines(value, depth + 1)}" for key, value in content.items())
    return "{\n" + rows + "\n" + " " * depth + "}" + "\n" * (depth == 0)


class Results:
    """A results file: which of its ``cells`` are missing, and new ones, each written as soon as it is known."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.content = load(options.results) if options.results.exists() else {"cells": {}}
        self.cells: dict[str, dict] = self.content["cells"]
        self.target = options.output or options.results
        self.again = options.again
        self.ends = time.monotonic() + options.budget

    def wants(self, name: str) -> bool:
        """Whether to measure a cell: it is missing, its step failed, or with ``--again``."""
        known = name in self.cells and self.cells[name].get("status") != "failed"
        return self.again or not known

    def add(self, name: str, cell: dict) -> None:
        """Keep a cell."""
        self.cells[name] = cell
        write(self.target, self.content)
