"""Some shapes of each family of kernels in Triton's interpreter, which needs a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

pytestmark = [pytest.mark.process, pytest.mark.smoke]

TESTS = {
    "maxsim": ["half", "everything_masked", "only_one_gradient", "empty"],
    "xtr": ["everything_masked", "large_and_zero_similarities", "empty"],
    "projection": ["numbers_of_rows", "only_one_gradient"],
    "attention": ["half", "heads_and_layouts", "nothing"],
}


def test_every_family():
    names = [f"test_{family}_interpreted.py::test_{name}" for family, names in TESTS.items() for name in names]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "interpret", *names],
        cwd=Path(__file__).parent,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0 and " skipped" not in run.stdout, run.stdout[-8000:] + run.stderr[-2000:]
