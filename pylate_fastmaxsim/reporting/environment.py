"""The machine, and the versions of packages, that a result was measured with."""

import os
import platform
from importlib import metadata
from typing import Any

import torch

# Packages that decide about speed. PyLate scores with late-interaction-kernels or flash-maxsim if they are installed.
PACKAGES = (
    "pylate-fastmaxsim",
    "torch",
    "triton",
    "pylate",
    "colpali-engine",
    "sentence-transformers",
    "transformers",
    "accelerate",
    "datasets",
    "late-interaction-kernels",
    "flash-maxsim",
)


def versions() -> dict[str, str | None]:
    """The version of each package; None where it is not installed."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


def environment(device: torch.device) -> dict[str, Any]:
    """The machine with ``device``, and the versions of packages that are installed."""
    if device.type == "cuda":
        machine = {
            "device": torch.cuda.get_device_name(device),
            "device_memory": torch.cuda.get_device_properties(device).total_memory,
            "cuda": torch.version.cuda,
        }
    else:
        threads = torch.get_num_threads()
        machine = {"device": f"CPU ({threads} thread{'s' * (threads > 1)})"}
    return {
        **machine,
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        **{package: version for package, version in versions().items() if version is not None},
    }
