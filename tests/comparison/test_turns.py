"""Processes take turns: who steps when, what is counted, and what is left when one of them fails or all are ended."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

import pytest
import stepping

from pylate_fastmaxsim.comparison import turns
from pylate_fastmaxsim.comparison.turns import Child, take_turns


def child(folder: Path, name: str, **options) -> Child:
    options = {"trace": str(folder / "trace"), "steps": 16} | options
    code = f"import sys; sys.path.insert(0, {str(Path(stepping.__file__).parent)!r}); import stepping; stepping.main(**{options!r})"
    return Child(turns.python(code), folder / f"{name}.log")


def trace(folder: Path) -> list[int]:
    """How many steps each turn had, of whichever process."""
    return [len(list(steps)) for _, steps in groupby((folder / "trace").read_text().split())]


@pytest.mark.process
@pytest.mark.smoke
def test_two_processes_step_by_turns_in_exchanged_order(tmp_path):
    waited = []
    children = {"stock": child(tmp_path, "stock", seconds=0.02), "fast": child(tmp_path, "fast")}
    done = take_turns(children, on_wait=waited.append)
    # Warm-up of both, then blocks of 3: stock fast, fast stock, stock fast, fast stock (the last of 2 steps).
    assert trace(tmp_path) == [5, 5, 3, 6, 6, 5, 2]
    stock, fast = done.runs.values()
    for run in (stock, fast):
        assert run.status == "finished" and run.result == {"quality": 0.5} and run.device == "cpu"
        assert [step["loss"] for step in run.steps] == [1 / step for step in range(1, 17)]
        assert [(block["steps"], block["pair"]) for block in run.blocks] == [
            *((1, None), (4, None)),
            *((3, 0), (3, 1), (3, 2), (2, 3)),
        ]
        assert run.memory["peak"] >= run.memory["before"] > 2**20
        assert sum(block["seconds"] for block in run.blocks) < run.wall_seconds
        # Of one thread that never sleeps.
        assert all(block["cpu_seconds"] <= 1.1 * block["seconds"] + 0.02 for block in run.blocks)
    assert not done.restarted and set(waited) == {"stock", "fast"}
    assert sum(block["seconds"] for block in stock.blocks) / sum(block["seconds"] for block in fast.blocks) > 1.5
