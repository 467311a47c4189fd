"""Starts a test module once more in a process where Triton interprets kernels.

Triton decides when a kernel is defined whether it is interpreted, and other tests may have imported it before.
"""

from __future__ import annotations

import os
import subprocess
import sys

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def run_interpreted(file: str) -> None:
    """Run the tests of a file, which is the module that calls this, and fail as they fail."""
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", file],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
