"""What this machine has, what would be patched, and what would run slower than it could."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from dataclasses import dataclass
from importlib import util

import torch

from pylate_fastmaxsim.integrations.enable import available_patches, not_accelerated
from pylate_fastmaxsim.integrations.options import forbidden
from pylate_fastmaxsim.integrations.patching.fallback import asked_backend
from pylate_fastmaxsim.reporting import environment

_SWITCHES = (
    "PYLATE_FASTMAXSIM",
    "PYLATE_SCORES_BACKEND",
    "COLPALI_SCORES_BACKEND",
    "TRITON_INTERPRET",
    "CUDA_VISIBLE_DEVICES",
)


@dataclass(frozen=True)
class Report:
    """What :func:`report` found.

    Parameters
    ----------
    versions
        Version of Python and of each package; ``None`` where it is not installed.
    devices
        A line for each CUDA device, or one for the CPU.
    switches
        The environment variables that matter, as they are set; ``None`` where one is not.
    patches
        Dotted names of what ``enable()`` replaces; empty where it cannot.
    fallbacks
        A sentence for each thing that runs slower here than it could, and why.
    """

    versions: dict[str, str | None]
    devices: list[str]
    switches: dict[str, str | None]
    patches: list[str]
    fallbacks: list[str]


def report() -> Report:
    """Look at this machine. Imports PyLate and colpali-engine where they are installed; changes nothing.

    Examples
    --------
    >>> "torch" in report().versions
    True
    """
    fallbacks = _fallbacks()
    try:
        patches = [patch.target for patch in available_patches()]
        fallbacks[:0] = not_accelerated()
    except ImportError as error:
        patches = []
        fallbacks.insert(0, f"Nothing is patched: {error}")
    return Report(
        versions={"python": platform.python_version()} | environment.versions(),
        devices=_devices(),
        switches={name: os.environ.get(name) for name in _SWITCHES},
        patches=patches,
        fallbacks=fallbacks,
    )


def render(found: Report | None = None) -> str:
    """The report as plain text.

    Examples
    --------
    >>> print(render(Report({"torch": "2.11.0"}, ["CPU"], {"PYLATE_FASTMAXSIM": None}, [], ["No GPU."])))
    Versions
      torch  2.11.0
    <BLANKLINE>
    Devices
      CPU
    <BLANKLINE>
    Environment
      PYLATE_FASTMAXSIM  not set
    <BLANKLINE>
    enable() replaces
      nothing
    <BLANKLINE>
    What falls back here
      No GPU.
    """
    found = report() if found is None else found
    sections = {
        "Versions": _table(found.versions, "not installed"),
        "Devices": found.devices,
        "Environment": _table(found.switches, "not set"),
        "enable() replaces": found.patches or ["nothing"],
        "What falls back here": found.fallbacks or ["nothing"],
    }
    return "\n\n".join("\n".join([title, *(f"  {line}" for line in lines)]) for title, lines in sections.items())


def _table(values: dict[str, str | None], missing: str) -> list[str]:
    width = max(map(len, values))
    return [f"{name:<{width}}  {missing if value is None else value}" for name, value in values.items()]


def _devices() -> list[str]:
    if not torch.cuda.is_available():
        threads = torch.get_num_threads()
        return [f"CPU, {threads} thread{'s' * (threads > 1)} ({platform.machine()})"]
    driver = _driver_version()
    lines = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        lines.append(
            f"cuda:{index} {properties.name}, compute capability {properties.major}.{properties.minor}, "
            f"{properties.total_memory / 2**30:.0f} GiB, driver {driver}, CUDA {torch.version.cuda}, "
            f"bf16 {'yes' if properties.major >= 8 else 'no'}"
        )
    return lines


def _driver_version() -> str:
    if shutil.which("nvidia-smi") is None:
        return "unknown"
    try:
        answer = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=False,
            timeout=30,
        )
    except (OSError, subprocess.SubprocessError):  # it hangs where a GPU does
        return "unknown"
    return answer.stdout.partition("\n")[0].strip() or "unknown"


def _fallbacks() -> list[str]:
    lines = []
    try:
        if forbidden():
            lines.append(f"PYLATE_FASTMAXSIM={os.environ['PYLATE_FASTMAXSIM']}: enable() does nothing.")
    except ValueError as error:
        lines.append(f"enable() raises: {error}")
    for variable, what in (
        ("PYLATE_SCORES_BACKEND", "PyLate's scores run as they came, and so do its losses, with padding"),
        ("COLPALI_SCORES_BACKEND", "colpali-engine's scores and losses run as they came"),
    ):
        if (backend := asked_backend(variable)) is not None:
            lines.append(f"{variable}={backend}: {what}.")
    if not torch.cuda.is_available():
        lines.append(
            "No CUDA device: MaxSim, the projection before it and SPLADE's head run in blocks of plain PyTorch, and documents "
            "are encoded in groups of similar length."
        )
        return lines
    if util.find_spec("triton") is None:
        lines.append(
            "No triton: MaxSim, the projection before it and SPLADE's head run in blocks of plain PyTorch instead of the "
            "CUDA kernels."
        )
    capability = torch.cuda.get_device_capability()
    if torch.version.cuda is None or capability < (8, 0):
        lines.append(
            "No NVIDIA GPU of compute capability 8.0 or newer: MaxSim, the projection before it and SPLADE's head run in "
            "blocks of plain PyTorch instead of the CUDA kernels."
        )
    if capability < (8, 0):
        lines.append(
            "Compute capability below 8.0: no variable-length attention, so documents are encoded in groups of similar "
            "length."
        )
    try:
        from transformers import AttentionInterface  # noqa: F401
    except ImportError:
        lines.append(
            "transformers without AttentionInterface (or none): documents are encoded in groups of similar length."
        )
    lines.append("Training with neither bf16 nor fp16 encodes documents in groups of similar length.")
    return lines
