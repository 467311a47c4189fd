"""A training script in a folder, compared stock and fast by the command."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from pylate_fastmaxsim.comparison.script import Ranks, child_of
from pylate_fastmaxsim.comparison.turns import take_turns
from pylate_fastmaxsim.comparison.verdict import FAST, summarize_run

COMMAND = ("-m", "pylate_fastmaxsim.cli", "compare")


def compare(
    folder: Path, script: str, *options: str, command: tuple[str, ...] = COMMAND
) -> subprocess.CompletedProcess:
    """Write a script into ``folder`` as train.py and compare it there."""
    (folder / "train.py").write_text(script, encoding="utf-8")
    words = [sys.executable, *command, *options, "train.py"]
    environment = {"PYLATE_FASTMAXSIM": "0"} | os.environ  # of no account: each run has its own
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=400)


def compared(folder: Path, script: str, *options: str, **how: Any) -> dict[str, Any]:
    """The content of compare.json of a script that can be compared; nothing else of it is in the folder."""
    before = {path.name for path in folder.iterdir()}
    done = compare(folder, script, *options, **how)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in folder.iterdir()} == {*before, "train.py", "compare"}
    assert "peak memory" in done.stdout
    assert done.stdout.endswith("compare.json\ncompare/compare.png\ncompare/compare.html\n")
    return json.loads((folder / "compare" / "compare.json").read_text(encoding="utf-8"))


def accelerated(folder: Path, script: str, steps: int) -> dict[str, Any]:
    """A script in a folder, with the flag only, which takes half as long; nothing else is in the folder afterwards."""
    scratch = folder.with_name(f"{folder.name}-scratch")
    scratch.mkdir()
    (folder / "train.py").write_text(script, encoding="utf-8")
    words = ["--steps", str(steps), str(folder / "train.py")]
    turns = take_turns({FAST: child_of(FAST, scratch, scratch, words, Ranks({}))})
    assert {path.name for path in folder.iterdir()} == {"train.py"}
    return summarize_run(turns.runs[FAST])
