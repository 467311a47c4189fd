import random

import numpy as np
import pytest
from accelerate import PartialState

from pylate_fastmaxsim.recipes.mining.mine import CARD, OWN_FILES, SUMMARY_FILE, put_into_place
from pylate_fastmaxsim.recipes.mining.resumable import Work, read_part
from tests.support.power_cut import states, written


def parts(folder, seed=0) -> tuple[list, list[int]]:
    """Files of two parts, and the beginnings of those that were computed."""
    computed = []

    def compute(part, bar):
        computed.append(part.start)
        return seed + np.arange(part.start, part.stop)

    files = Work(folder, PartialState()).parts("search", {"seed": seed}, "", "", 10, 5, compute)
    assert np.concatenate(list(map(read_part, files))).tolist() == list(range(seed, seed + 10))
    return files, computed


@pytest.mark.parametrize("name", ["search-0000000005.npz", "settings-search.json"])
def test_a_flipped_bit_is_never_another_number(name, tmp_path, caplog):
    parts(tmp_path)
    whole, draw = (tmp_path / name).read_bytes(), random.Random(0)
    for _ in range(100):
        flipped = bytearray(whole)
        flipped[draw.randrange(len(whole))] ^= 1 << draw.randrange(8)
        (tmp_path / name).write_bytes(flipped)
        parts(tmp_path)  # compares what it reads
        (tmp_path / name).write_bytes(whole)
    assert "is damaged, so it is computed again" in caplog.text or name.startswith("settings")
    (tmp_path / name).write_bytes(whole[:-30])
    assert parts(tmp_path)[1] == ([5] if name.endswith("npz") else [0, 5])


def test_kills_and_power_cuts_leave_parts_that_work_goes_on_with(tmp_path):
    root = written({}, tmp_path / "root")
    parts(root, seed=0)
    for number, (_, state) in enumerate(states(root, lambda: parts(root, seed=7), cuts=10)):
        parts(written(state, tmp_path / str(number)), seed=7)


@pytest.mark.parametrize("first", [True, False])
def test_kills_and_power_cuts_never_show_new_data_that_are_not_whole(first, tmp_path):
    new = {name: f"new {name}".encode() for name in OWN_FILES}
    old = {} if first else {name: f"old {name}".encode() for name in OWN_FILES if name != SUMMARY_FILE}
    before = {f"unfinished/data/{name}": content for name, content in new.items()}
    before |= {f"mined/{name}": content for name, content in old.items()}
    before |= dict.fromkeys(("unfinished", "unfinished/data", *(() if first else ("mined",))))
    root = written(before, tmp_path / "root")
    found = states(root, lambda: put_into_place(root / "unfinished/data", root / "mined", not first), cuts=10)
    for _, state in found:
        tables = {name: state.get(f"mined/{name}") for name in OWN_FILES if name != CARD}
        if tables[SUMMARY_FILE] is not None:  # complete, as its file says
            assert tables == {name: new[name] for name in tables}
        elif tables["train.parquet"] is not None:  # can be trained on
            assert tables in [{name: each.get(name) for name in tables} for each in (old, new | {SUMMARY_FILE: None})]
