"""The progress of tasks that take minutes: a bar on a terminal, elsewhere a line now and then."""

import sys
from collections.abc import Callable
from typing import Any, TextIO

from tqdm import tqdm

LINE_SECONDS = 30.0  # from one line to the next


class Progress(tqdm):
    """A bar of ``total`` items, of which ``done`` are done; where stderr is no terminal, a line every 30 seconds."""

    def __init__(self, title: str, total: int | None, done: int = 0, unit: str = " items", **options: Any) -> None:
        if not sys.stderr.isatty():
            options |= {"mininterval": LINE_SECONDS, "maxinterval": LINE_SECONDS, "delay": LINE_SECONDS}
        # The rate is the mean: batches may take a minute each.
        options |= {"unit_scale": True, "miniters": 1, "smoothing": 0, "dynamic_ncols": True}
        super().__init__(desc=title, total=total, initial=done, unit=unit, **options)

    @staticmethod
    def status_printer(file: TextIO) -> Callable[[str], None]:
        """How tqdm shows its text."""
        if file.isatty():
            return tqdm.status_printer(file)
        return lambda text: print(text, file=file, flush=True)
