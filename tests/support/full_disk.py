"""A disk that is full at a size, for files that this process writes."""

import io
import resource
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout


@contextmanager
def no_file_above(size: int) -> Iterator[None]:
    """Context in which writing a file beyond ``size`` bytes fails with an OSError, whoever writes it.

    What is printed goes nowhere: under pytest it is written to files too, and a bar that fails there keeps tqdm's lock.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
