"""The files of results: how one is written, and what every cell records beside its numbers."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
from pathlib import Path

import torch

PACKAGES = [
    "torch",
    "triton",
    "pylate",
    "sentence-transformers",
    "transformers",
    "late-interaction-kernels",
    "flash-maxsim",
]

# When this run began, in an environment variable, so that the processes which it starts belong to the same run.
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
    """Machine, versions, date and when this run began, recorded with every cell."""
    import pylate_fastmaxsim

    def version(package: str) -> str | None:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return None

    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "host": f"{os.cpu_count()} cores of {processor()}",
        "driver_cuda": torch.version.cuda,
        "python": platform.python_version(),
        "pylate-fastmaxsim": pylate_fastmaxsim.__version__,
        **{package: version(package) for package in PACKAGES},
        "date": datetime.date.today().isoformat(),
        "run": os.environ[RUN],
    }


def write(results: Path, content: dict) -> None:
    """The results file, which is never there in part."""
    results.parent.mkdir(parents=True, exist_ok=True)
    temporary = results.with_suffix(".tmp")
    temporary.write_text(json.dumps(content, indent=1) + "\n")
    temporary.replace(results)
