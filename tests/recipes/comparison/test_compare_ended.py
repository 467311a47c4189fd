"""Comparisons that are ended, and runs of them that are killed."""

import errno
import os
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

from pylate_fastmaxsim.recipes.comparison import compare as comparing
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


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (comparing.RunFailed("The fast run failed: no"), "fastmaxsim: The fast run failed: no"),
        (KeyboardInterrupt(), "\nInterrupted: a comparison is not resumed, the same command starts it again"),
        (
            OSError(errno.ENOSPC, "full", "x"),
            "\nfastmaxsim: x cannot be written: No space left on device; the steps of ",
        ),
    ],
)
def test_results_of_an_earlier_comparison_are_said_to_be_such(error, said, tmp_path, monkeypatch):
    file, out = write(tmp_path, tiny(tmp_path)), tmp_path / "out"
    new = []

    def run(*arguments):
        for name in new:
            (out / name).write_text("new")
        raise error

    monkeypatch.setattr(comparing, "compare", run)
    sentence = "; of an earlier comparison and not of this one: "
    done = compare(file)
    assert done.stderr.startswith(said) and sentence not in done.stderr
    out.mkdir()
    for name in ("compare.json", "compare.html"):
        (out / name).write_text("old")
        os.utime(out / name, (1, 1))
    done = compare(file)
    assert done.stderr.startswith(said) and f"{sentence}{out}/compare.json, {out}/compare.html" in done.stderr
    # A sweep that fails comes after the numbers of this comparison were written.
    new = ["compare.json"]
    assert f"{sentence}{out}/compare.html" in compare(file).stderr
    assert (out / "compare.html").read_text() == "old"
