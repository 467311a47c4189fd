"""Some shapes of each family of kernels in Triton's interpreter, which needs a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

pytestmark = [pytest.mark.process, pytest.mark.smoke]

TESTS = {
    "test_maxsim": ["half", "everything_masked", "empty"],
    "winner_backward/test_winner_backward": ["half"],
    "test_xtr": ["everything_masked", "large_and_zero_similarities", "empty"],
    "test_projection": ["numbers_of_rows", "only_one_gradient"],
    "test_attention": ["half", "heads_and_layouts", "nothing"],
}


def test_every_family():
    names = [f"{file}_interpreted.py::test_{name}" for file, names in TESTS.items() for name in names]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "interpret", *names],
        cwd=Path(__file__).parent,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0 and " skipped" not in run.stdout, run.stdout[-8000:] + run.stderr[-2000:]
