"""Peak memory of a part of a process: allocated on the GPU, or resident on a CPU."""

import resource
import sys
from contextlib import suppress
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")

# Texts of errors that mean out of memory: of PyTorch on a CPU, and of CUDA calls outside PyTorch's allocator.
_OUT_OF_MEMORY = ("can't allocate memory", "CUDA error: out of memory", "Triton Error [CUDA]: out of memory")


class PeakMemory:
    """Peak memory since construction, in bytes.

    On a GPU it is ``torch.cuda.max_memory_allocated``. On a CPU it is the largest resident set since
    construction where the kernel lets a process reset its high-water mark (Linux), else since the
    process started.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
            self.before = torch.cuda.memory_allocated(device)
        else:
            with suppress(OSError):
                _CLEAR_REFS.write_text("5")  # resets VmHWM to the current resident set, see proc(5)
            self.before = _resident("VmRSS") or peak_resident()

    def peak(self) -> int:
        """Bytes at the highest point so far."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return peak_resident()

    def figures(self) -> dict[str, int]:
        """Bytes ``before`` and at the ``peak``, and on a GPU the most that PyTorch's allocator ``held``.

        The allocator holds more than is in use when batches differ in size. Other programs see what it holds.
        """
        held = {"held": torch.cuda.max_memory_reserved(self.device)} if self.device.type == "cuda" else {}
        return {"before": self.before, "peak": self.peak(), **held}


def peak_resident() -> int:
    """The high-water mark of this process's resident memory, in bytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    return _resident("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _resident(key: str) -> int | None:
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:")), None)


def is_out_of_memory(error: BaseException) -> bool:
    """True if an error means out of memory, by its type or its text."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(
        text in str(error) for text in _OUT_OF_MEMORY
    )
