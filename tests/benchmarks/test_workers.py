"""The measuring processes of the benchmarks: what becomes of one that fails, ends or takes too long."""

from __future__ import annotations

import pytest

from benchmarks.harness.workers import Worker

pytestmark = pytest.mark.bench

# Stands for a benchmark's process: does what the cell says.
PROGRAM = """
import os, sys, time
from benchmarks.harness.workers import serve

def answer(cell):
    if "sleep" in cell:
        time.sleep(cell["sleep"])
    if "exit" in cell:
        print("RuntimeError: CUDA error: misaligned address\\nframe #0: start", file=sys.stderr, flush=True)
        os._exit(cell["exit"])
    if "raise" in cell:
        raise ValueError(cell["raise"])
    print("not an answer")
    return {"process": os.getpid(), "variable": os.environ.get("OF_THE_WORKER")}

serve(answer)
"""


@pytest.fixture
def worker(tmp_path, monkeypatch):
    monkeypatch.setattr(Worker, "GRACE", 0.5)
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    with Worker([str(program)], timeout=120, OF_THE_WORKER="set") as worker:
        yield worker
    assert worker.process.poll() is not None


def test_a_cell_that_raises_or_ends_its_process_is_a_result(worker):
    first = worker.ask({})
    assert first["variable"] == "set"
    assert worker.ask({"raise": "no such shape"}) == {"failure": "ValueError: no such shape"}
    assert worker.ask({}) == first
    sentence = "the process ended with status 3: RuntimeError: CUDA error: misaligned address"
    assert worker.ask({"exit": 3}) == {"failure": sentence}
    assert worker.ask({})["process"] != first["process"]


def test_a_cell_that_takes_too_long_is_a_result_and_a_process_at_work_ends_with_its_worker(worker):
    worker.start()
    worker.timeout = 0.5
    assert worker.ask({"sleep": 60}) == {"failure": "not finished in 0.5 s"}
    worker.timeout = 120
    assert worker.ask({})["variable"] == "set"
    worker.process.stdin.write('{"sleep": 60}\n')
    worker.process.stdin.flush()  # the fixture checks that it ended
