"""Progress bars on the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

# Batches may take a minute each, and a rate needs several of them.
RATE_OVER = 600.0


class _Rate(ProgressColumn):
    """Items a second."""

    def __init__(self, unit: str) -> None:
        super().__init__()
        self.unit = unit

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text(f"{speed:,.2f} {self.unit}/s" if speed else "")


def _bars(unit: str, *more: ProgressColumn, **options: float) -> Progress:
    console = Console(stderr=True, emoji=False)
    return Progress(
        TextColumn("{task.description}", table_column=Column(no_wrap=True)),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        _Rate(unit),
        TimeRemainingColumn(),
        *more,
        console=console,
        disable=not console.is_terminal,
        **options,
    )


@contextmanager
def progress_of_runs() -> Iterator[Callable[..., None]]:
    """A bar for each run of a comparison, with its rate and the time left."""
    bars = _bars("steps", TextColumn("{task.fields[bar]}", markup=False))
    tasks = {}

    def on_progress(run: str, bar: str, done: int, of: int | None) -> None:
        bars.start()
        if run not in tasks:
            tasks[run] = bars.add_task(run, total=None, bar="")
        bars.update(tasks[run], completed=done, total=of, bar=bar)

    try:
        yield on_progress
    finally:
        bars.stop()


@contextmanager
def progress_of_tasks() -> Iterator[Callable[..., Callable[[int], None]]]:
    """A bar for each task of a search: ``begin(task, total, done)`` returns what is told how many more are done."""
    bars = _bars("items", speed_estimate_period=RATE_OVER)

    def begin(task: str, total: int, done: int = 0) -> Callable[[int], None]:
        bars.start()
        number = bars.add_task(task, total=total, completed=done)
        return lambda more: bars.advance(number, more)

    try:
        yield begin
    finally:
        bars.stop()
