"""Run a suite of benchmarks: ``python -m benchmarks SUITE [--only CELL ...] [--again] [--render]``.

``python -m benchmarks SUITE --help`` says what it measures and lists its options. ``python -m benchmarks --render`` writes
the tables of the README and of docs/ from the committed results.
"""

import sys

from benchmarks.harness.suite import SUITES, run_suite

if __name__ == "__main__":
    name, arguments = (sys.argv[1] if len(sys.argv) > 1 else ""), sys.argv[2:]
    if name == "--render":
        from benchmarks.documents import render

        render()
    elif name in SUITES:
        run_suite(name, arguments)
    else:
        sys.exit(f"{__doc__}\nSuites: {', '.join(SUITES)}.")
