"""Seconds by what they were spent on, each second counted once."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

Item = TypeVar("Item")


class Clock:
    """Add up the seconds of each task in ``seconds``. A task within another one stops the clock of the outer.

    The work that tasks queued on a GPU is waited for, so that it counts as theirs.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self.seconds: dict[str, float] = {}
        self._task: str | None = None
        self._since = 0.0

    @contextmanager
    def during(self, task: str) -> Iterator[None]:
        """Context whose seconds are those of a task."""
        outer = self._task
        self._switch(task)
        try:
            yield
        finally:
            self._switch(outer)

    def iterate(self, task: str, items: Iterable[Item]) -> Iterator[Item]:
        """Iterate over items; the seconds to get each of them are those of a task."""
        iterator = iter(items)
        while True:
            with self.during(task):
                item = next(iterator, self)
            if item is self:
                return
            yield item

    def _switch(self, task: str | None) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = time.perf_counter()
        if self._task is not None:
            self.seconds[self._task] = self.seconds.get(self._task, 0.0) + now - self._since
        self._task, self._since = task, now
