"""Comparisons that are ended, and runs of them that are killed."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("typer")
pytest.importorskip("matplotlib")
pytest.importorskip("pylate")

from test_compare import compare
from tiny_recipe import tiny, write

from pylate_fastmaxsim.recipes import compare as comparing
from pylate_fastmaxsim.recipes.load import load_recipe


def _children(process: int) -> list[int]:
    return list(map(int, Path(f"/proc/{process}/task/{process}/children").read_text().split()))


def _wait_for(done) -> None:
    deadline = time.monotonic() + 120
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_comparison_that_is_ended_ends_its_run_and_until_then_no_other_may_begin(number, tmp_path):
    file = write(tmp_path, tiny(tmp_path, training={"max_steps": 1_000_000}))
    command = [sys.executable, "-m", "pylate_fastmaxsim.cli", "compare", str(file)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        _wait_for((tmp_path / "out" / "compare" / "stock.steps.jsonl").exists)
        (child,) = _children(process.pid)
        second = compare(file, "training.max_steps=1")
        assert second.exit_code == 2 and second.stderr.startswith(
            "fastmaxsim: output_dir: another command compares in "
        )
    finally:
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == (-number if number == signal.SIGKILL else 128 + number)
    assert "Traceback" not in errors
    # Of SIGKILL the system ends it, a moment later. What has ended and nobody asked for has no program either.
    _wait_for(lambda: not Path(f"/proc/{child}/exe").exists())


def test_a_run_that_is_killed_while_it_writes_its_result_has_none(tmp_path, monkeypatch):
    program = """
import os, signal
from pathlib import Path
from pylate_fastmaxsim.recipes import measure
def half(file, text, **options):
    with open(file, "w") as target:
        target.write(text[:len(text) // 2])
    os.kill(os.getpid(), signal.SIGKILL)
measure.measure = lambda *arguments: {"status": "finished"}
Path.write_text = half
measure.main()
"""
    monkeypatch.setattr(comparing, "_program", lambda: program)
    recipe = load_recipe(write(tmp_path, tiny(tmp_path)))
    assert comparing._run(recipe, tmp_path, "stock", lambda progress: None, "stock run") == (
        {"status": "out of memory"},
        [],
    )
