"""Results files of the benchmarks: what is kept, measured again, and written where."""

import json
from argparse import ArgumentParser

import pytest

from benchmarks.harness.records import Results, add_options


@pytest.fixture
def results(tmp_path):
    """``results(*arguments)``: the results file of a command that was given them."""
    file = tmp_path / "results.json"
    file.write_text(json.dumps({"cells": {"known": {"status": "ok"}, "broken": {"status": "failed"}}}))
    parser = ArgumentParser()
    add_options(parser, file, timeout=1)
    return lambda *arguments: Results(parser.parse_args(arguments))


def test_only_missing_and_failed_cells_are_measured(results):
    assert [name for name in ("known", "broken", "new") if results().wants(name)] == ["broken", "new"]
    assert results("--again").wants("known")
    assert not results("--budget", "0").wants("new")


def test_a_cell_is_written_at_once_and_can_go_elsewhere(results, tmp_path):
    results().add("new", {"status": "ok"}, "new")
    assert list(json.loads((tmp_path / "results.json").read_text())["cells"]) == ["known", "broken", "new"]
    before = (tmp_path / "results.json").read_text()
    results("--output", str(tmp_path / "other.json")).add("newer", {"status": "ok"}, "newer")
    assert "newer" in json.loads((tmp_path / "other.json").read_text())["cells"]
    assert (tmp_path / "results.json").read_text() == before
