"""A disk that is full: a process of its own whose files cannot be larger than so many bytes."""

from __future__ import annotations

import multiprocessing
import os
import resource
import sys
from collections.abc import Callable


def _limited(size: int, write: Callable[[], object], said) -> None:
    # A bar is no file of the function.
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    try:
        write()
    except Exception as error:
        said.send(f"{type(error).__name__}: {error}")
    else:
        said.send("")


def said_on_full_disk(size: int, write: Callable[[], object]) -> str:
    """The error that ``write`` raises, with its type; none if all of its files fit."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_limited, args=(size, write, there))
    process.start()
    there.close()
    said = here.recv()
    process.join()
    return said
