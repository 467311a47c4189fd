"""Cells of training steps warm up side by side and are measured one after the other."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.training import cell_processes

pytestmark = pytest.mark.bench

# Stands for training/cell.py: reports when it was warm, when its turn began and when it ended.
CELL = """
import json, sys, time
from pathlib import Path
batch = int(sys.argv[sys.argv.index("--batch") + 1])
if batch == 3:
    sys.exit("broken before it was warm")
if batch == 6:
    time.sleep(0.5)
print("READY", flush=True)
if batch == 5:
    sys.exit("broken while it waited")
warm = time.monotonic()
sys.stdin.readline()
begin = time.monotonic()
time.sleep(0.2 if batch != 4 else 60)
status = "ok"
if batch == 2 and Path("beside").exists():  # the first time only
    Path("beside").unlink()
    status = "out of memory"
print("RESULT " + json.dumps({"status": status, "warm": warm, "begin": begin, "end": time.monotonic()}))
"""


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """``measured(*batches)``: results in the order of the batches."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cell.py").write_text(CELL)
    monkeypatch.setattr(cell_processes, "CELL", [str(tmp_path / "cell.py")])

    def run(*batches: int, timeout: float = 30) -> list[dict]:
        cells = [{"path": "fast", "batch": batch, "compile": False, "checkpointing": False} for batch in batches]
        return [result for _, result in sorted(cell_processes.measure(cells, [], timeout))]

    return run


def test_turns_do_not_overlap_and_begin_when_all_are_warm(measured):
    results = measured(10, 11, 12)
    turns = sorted((result["begin"], result["end"]) for result in results)
    assert turns[0][0] >= max(result["warm"] for result in results)
    assert all(end <= begin for (_, end), (begin, _) in zip(turns, turns[1:], strict=False))


def test_failures_are_results_and_nobody_waits_for_them(measured):
    early, endless, late, slow = measured(3, 4, 5, 6, timeout=5)
    assert early == {"status": "failed", "detail": "broken before it was warm", "stderr": "broken before it was warm\n"}
    assert late["status"] == "failed" and late["detail"] == "broken while it waited"
    assert endless == {"status": "not finished in 5 s"} and slow["status"] == "ok"


def test_out_of_memory_beside_others_is_tried_alone(measured):
    Path("beside").touch()
    assert [result["status"] for result in measured(2, 10)] == ["ok", "ok"]
    Path("beside").touch()
    assert measured(2)[0]["status"] == "out of memory"
