"""Suites of benchmarks, run as a user runs them."""

import subprocess
import sys

from tests.support.paths import ROOT


def run_benchmark(name: str, *arguments: str) -> str:
    """What ``python -m benchmarks NAME`` prints; AssertionError with its errors where it fails."""
    command = [sys.executable, "-m", "benchmarks", name, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout
