"""Cells of a benchmark warm up side by side and are measured one after the other."""

from __future__ import annotations

from pathlib import Path

import pytest

# Stands for training/cell.py: notes when it was warm, when its turn began and when it ended.
CELL = """
import json, sys, time
from pathlib import Path
batch = int(sys.argv[sys.argv.index("--batch") + 1])
if batch == 3:
    sys.exit("broken before it was warm")
if batch == 7:
    sys.exit("Traceback:\\nRuntimeError: CUDA error: misaligned address\\nframe #0: start\\nframe #1: main")
if batch == 6:
    time.sleep(1)
print("READY", flush=True)
if batch == 5:
    sys.exit("broken while it waited")
warm = time.monotonic()
sys.stdin.readline()
begin = time.monotonic()
time.sleep(0.3 if batch != 4 else 60)
status = "ok"
if batch == 2 and Path("beside").exists():  # the first time only
    Path("beside").unlink()
    status = "out of memory"
print("RESULT " + json.dumps({"status": status, "warm": warm, "begin": begin, "end": time.monotonic()}))
"""


@pytest.fixture
def processes(tmp_path, monkeypatch):
    from benchmarks.training import cell_processes

    monkeypatch.chdir(tmp_path)
    (tmp_path / "cell.py").write_text(CELL)
    monkeypatch.setattr(cell_processes, "CELL", [str(tmp_path / "cell.py")])
    return cell_processes


def cells(*batches):
    return [{"path": "fast", "batch": batch, "compile": False, "checkpointing": False} for batch in batches]


def measured(processes, *batches, timeout=30):
    """Results in the order of the batches."""
    return [result for _, result in sorted(processes.measure(cells(*batches), [], timeout))]


def test_turns_do_not_overlap_and_begin_when_all_are_warm(processes):
    results = measured(processes, 10, 11, 12)
    turns = sorted((result["begin"], result["end"]) for result in results)
    assert turns[0][0] >= max(result["warm"] for result in results)
    assert all(end <= begin for (_, end), (begin, _) in zip(turns, turns[1:], strict=False))


def test_one_that_fails_keeps_nobody_waiting(processes):
    good, broken = measured(processes, 10, 3)
    assert good["status"] == "ok"
    assert broken["status"] == "failed" and broken["detail"] == "broken before it was warm"


def test_what_is_said_of_one_that_is_aborted_is_its_error(processes):
    assert measured(processes, 7)[0]["detail"] == "RuntimeError: CUDA error: misaligned address"


def test_one_that_dies_while_it_waits_is_a_result(processes):
    broken, slow = measured(processes, 5, 6)
    assert broken["status"] == "failed" and broken["detail"] == "broken while it waited"
    assert slow["status"] == "ok"


def test_out_of_memory_beside_others_is_tried_alone(processes):
    Path("beside").touch()
    assert [result["status"] for result in measured(processes, 10, 2)] == ["ok", "ok"]
    Path("beside").touch()
    assert measured(processes, 2)[0]["status"] == "out of memory"


def test_one_that_takes_too_long_is_stopped(processes):
    assert measured(processes, 4, timeout=1) == [{"status": "not finished in 1 s"}]
