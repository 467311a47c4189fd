"""The gate of a training process that takes turns with others: it waits for its turn, steps, and reports.

The other end is :func:`pylate_fastmaxsim.comparison.turns.take_turns`.
"""

from __future__ import annotations

import logging
import os
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from pylate_fastmaxsim._memory import PeakMemory

if TYPE_CHECKING:
    from typing import Self

# Names the file descriptor of an inherited pipe.
VARIABLE = "FASTMAXSIM_GATE"

_MEMORY_LIMIT = Path("/sys/fs/cgroup/memory.max")


def keep_warnings() -> list[str]:
    """A list to which each warning that this package logs from now on is added."""
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("pylate_fastmaxsim").addHandler(handler)
    return messages


class Gate:
    """Lets the steps of a process through while it has its turn, and reports each block of them.

    A turn is a number of steps. Behind the last of them :meth:`after_step` reports the block and waits for the next
    turn, so that loading data and the forward of the next step belong to a turn too.
    """

    def __init__(self, pipe: Connection) -> None:
        self._memory: PeakMemory | None = None
        self._pipe = pipe
        self._left: float = 0
        self._steps: list[dict[str, Any]] = []

    @classmethod
    def from_environment(cls, *more: Any) -> Self | None:
        """The gate that the parent process made, or None where it made none; ``more`` is what a subclass takes."""
        # Taken out, because processes that this one starts have no turns.
        named = os.environ.pop(VARIABLE, None)
        if named is None:
            return None
        os.set_inheritable(int(named), False)
        return cls(Connection(int(named)), *more)

    def before_step(self) -> None:
        """Wait for a turn, if this process has none: before its first step."""
        if not self._left:
            if self._memory is None:
                self._memory = PeakMemory(current_device())
            self._send(ready=True)
            self._wait()

    def after_step(self, **measured: Any) -> None:
        """Count a step; behind the last step of a turn, report the block and wait for the next turn.

        ``measured`` is reported with the step, under these names: numbers or tensors of one element, which are read at
        the end of a block only. ``of`` is how many steps there are in all, if that is known.
        """
        self._steps.append(measured)
        self._left -= 1
        if not self._left:
            self._send(block=self._block(), done=False)
            self._wait()

    def steps_done(self) -> None:
        """Say that no step follows, and wait for a turn for all the rest."""
        self._send(block=self._block(), done=True)
        self._wait()

    def finished(self, **result: Any) -> None:
        """Report the last block, and ``result``; nothing is measured from here on."""
        # In one message: it ends one turn, on this rank as on others.
        block = {"block": self._block(), "done": True} if self._steps else {}
        self._send(**block, finished=result)

    def wait_for_end(self) -> NoReturn:
        """Wait until the parent ends this process, or has ended: other ranks may wait for it meanwhile."""
        self._pipe.poll(None)
        os._exit(1)

    def _wait(self) -> None:
        try:
            self._left = self._pipe.recv()
        except (EOFError, OSError):  # the parent has ended
            os._exit(1)
        _synchronize()
        self._cpu_begun = cpu_seconds()
        self._begun = time.perf_counter()

    def _block(self) -> dict[str, Any]:
        _synchronize()
        seconds, cpu = time.perf_counter() - self._begun, cpu_seconds() - self._cpu_begun
        steps = [
            {name: value.item() if isinstance(value, torch.Tensor) else value for name, value in step.items()}
            for step in self._steps
        ]
        self._steps = []
        device = current_device()
        return {
            "seconds": seconds,
            "cpu_seconds": cpu,
            "steps": steps,
            "memory": self._memory.figures(),
            "device": device.type,
            "device_memory": _memory_of(device),
        }

    def _send(self, **message: Any) -> None:
        try:
            self._pipe.send(message)
        except OSError:  # the parent has ended
            os._exit(1)


def current_device() -> torch.device:
    """The GPU of this process, or the CPU where it uses none."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_initialized() else torch.device("cpu")


def _synchronize() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _memory_of(device: torch.device) -> int:
    """Memory of a device in bytes; of the CPU, what the machine or the container has."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, ValueError):  # no container, or one without a limit
        total = min(total, int(_MEMORY_LIMIT.read_text()))
    return total


def cpu_seconds() -> float:
    """CPU seconds of this process with its threads, and of its children, also of those that live (on Linux)."""
    times = os.times()
    return time.process_time() + times.children_user + times.children_system + _of_children("self")


def _of_children(process: str) -> float:
    ticks = os.sysconf("SC_CLK_TCK")
    seconds = 0.0
    for listed in Path("/proc", process).glob("task/*/children"):
        with suppress(OSError):  # what ends meanwhile
            for child in listed.read_text().split():
                # Behind the name, which may hold blanks: utime, stime, and those of children that ended.
                fields = Path("/proc", child, "stat").read_text().rpartition(")")[2].split()
                seconds += sum(map(int, fields[11:15])) / ticks + _of_children(child)
    return seconds
