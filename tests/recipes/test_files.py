"""Outputs of commands, and parts of mining."""

from __future__ import annotations

import numpy as np
import pytest
from accelerate import PartialState

from pylate_fastmaxsim.ops.pooled import LogSumExp, Softmax
from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.files.write import prepare_file
from pylate_fastmaxsim.recipes.mining.resumable import Work, read_part


def test_an_output_is_a_regular_file_that_is_no_input(tmp_path):
    (tmp_path / "corpus.jsonl").write_text("{}")
    (tmp_path / "link").symlink_to(tmp_path / "corpus.jsonl")
    for name in ("corpus.jsonl", "link", ".", "/dev/null", "x" * 300):
        with pytest.raises(RecipeError, match="^--run "):
            prepare_file("--run", tmp_path / name, (None, tmp_path / "corpus.jsonl"))
    prepare_file("--run", tmp_path / "run", (tmp_path / "corpus.jsonl",))


def test_damaged_parts_are_computed_again(tmp_path, caplog):
    def parts():
        def compute(part, bar):
            computed.append(part.start)
            return np.arange(part.start, part.stop)

        computed = []
        files = Work(tmp_path, PartialState()).parts("search", {"a": 1}, "", "", 10, 5, compute)
        assert np.concatenate(list(map(read_part, files))).tolist() == list(range(10))
        return files, computed

    files, computed = parts()
    assert computed == [0, 5] and parts()[1] == []
    whole = files[1].read_bytes()
    at = whole.index(np.arange(5, 10).tobytes())
    for damaged in (whole[:at] + b"x" + whole[at + 1 :], whole[:-30], b""):
        files[1].write_bytes(damaged)
        assert parts()[1] == [5] and "is damaged, so it is computed again" in caplog.text


@pytest.mark.parametrize("kind", [Softmax, LogSumExp])
@pytest.mark.parametrize("temperature", [1e-300, 1e-40, 1e40])
def test_a_temperature_that_float32_cannot_hold_is_refused(kind, temperature):
    with pytest.raises(ValueError, match="from 1e-30 to 1e30"):
        kind(temperature)
