"""Some shapes of each family of kernels in Triton's interpreter, which needs a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

pytestmark = [pytest.mark.process, pytest.mark.smoke]

CHOSEN = "half or large_and_zero or gradient_of_nan or heads_and_layouts or of_nothing_to_project"


def test_every_family():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "interpret"]
    run = subprocess.run(
        [*command, "-k", CHOSEN, "tests/kernels"],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0 and " skipped" not in run.stdout, run.stdout[-8000:] + run.stderr[-2000:]
