"""``fastmaxsim doctor``: what this machine has, what would be patched, and what would run slower than it could."""

import os
import platform
import subprocess
from importlib import util

import torch

from pylate_fastmaxsim.integrations.enable import gains
from pylate_fastmaxsim.integrations.hosts import find_replacements
from pylate_fastmaxsim.integrations.options import switched_off
from pylate_fastmaxsim.integrations.patching.fallback import asked_backend
from pylate_fastmaxsim.reporting import environment

_SWITCHES = (
    "PYLATE_FASTMAXSIM",
    "PYLATE_SCORES_BACKEND",
    "COLPALI_SCORES_BACKEND",
    "TRITON_INTERPRET",
    "CUDA_VISIBLE_DEVICES",
)


_REPLACED = "enable() replaces"


def report(verbose: bool = False) -> str:
    """Versions, devices, variables, what is accelerated and what falls back; with ``verbose`` each replaced function."""
    blocks = {title: lines for title, lines in diagnose().items() if verbose or title != _REPLACED}
    return "\n\n".join("\n".join([title, *(f"  {line}" for line in lines)]) for title, lines in blocks.items())


def diagnose() -> dict[str, list[str]]:
    """Lines about this machine by their title. Imports the hosts that are installed; changes nothing."""
    try:
        found = find_replacements()
        fallbacks = [each.left for each in found if each.left]
    except ImportError as error:
        found, fallbacks = [], [f"Nothing is patched: {error}"]
    packages = {"python": platform.python_version()} | environment.versions()
    return {
        "Versions": _aligned(packages, "not installed"),
        "Devices": _devices(),
        "Environment": _aligned({name: os.environ.get(name) for name in _SWITCHES}, "not set"),
        "enable() accelerates": [*gains(found)] or ["nothing"],
        _REPLACED: [each.patch.target for each in found if each.left is None] or ["nothing"],
        "What falls back here": [*fallbacks, *_fallbacks()] or ["nothing"],
    }


def _aligned(values: dict[str, str | None], missing: str) -> list[str]:
    width = max(map(len, values))
    return [f"{name:<{width}}  {missing if value is None else value}" for name, value in values.items()]


def _devices() -> list[str]:
    if not torch.cuda.is_available():
        threads = torch.get_num_threads()
        return [f"CPU, {threads} thread{'s' * (threads > 1)} ({platform.machine()})"]
    driver = _driver_version()
    cards = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return [
        f"cuda:{index} {card.name}, compute capability {card.major}.{card.minor}, {card.total_memory / 2**30:.0f} GiB, "
        f"driver {driver}, CUDA {torch.version.cuda}, bf16 {'yes' if card.major >= 8 else 'no'}"
        for index, card in enumerate(cards)
    ]


def _driver_version() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.SubprocessError):  # it is not there, or hangs where a GPU does
        return "unknown"
    return answer.stdout.partition("\n")[0].strip() or "unknown"


def _fallbacks() -> list[str]:
    lines = []
    try:
        if (setting := switched_off()) is not None:
            lines.append(f"{setting}: enable() does nothing.")
    except ValueError as error:
        lines.append(f"enable() raises: {error}")
    for variable, what in (
        ("PYLATE_SCORES_BACKEND", "PyLate's scores run as they came, and so do its losses, with padding"),
        ("COLPALI_SCORES_BACKEND", "colpali-engine's scores and losses run as they came"),
    ):
        if (backend := asked_backend(variable)) is not None:
            lines.append(f"{variable}={backend}: {what}.")
    plain = "MaxSim, the projection before it and SPLADE's head run in blocks of plain PyTorch"
    grouped = "documents are encoded in groups of similar length"
    if not torch.cuda.is_available():
        return [*lines, f"No CUDA device: {plain}, and {grouped}."]
    if util.find_spec("triton") is None:
        lines.append(f"No triton: {plain} instead of the CUDA kernels.")
    capability = torch.cuda.get_device_capability()
    if torch.version.cuda is None or capability < (8, 0):
        lines.append(f"No NVIDIA GPU of compute capability 8.0 or newer: {plain} instead of the CUDA kernels.")
    if capability < (8, 0):
        lines.append(f"Compute capability below 8.0: no variable-length attention, so {grouped}.")
    try:
        from transformers import AttentionInterface  # noqa: F401
    except ImportError:
        lines.append(f"transformers without AttentionInterface (or none): {grouped}.")
    lines.append("Training with neither bf16 nor fp16 encodes documents in groups of similar length.")
    return lines
