"""Results files of the benchmarks: what is kept, measured again, and written where."""

import json
from argparse import ArgumentParser

import pytest

from benchmarks.compare_results import compared
from benchmarks.harness.records import Results, load, write
from benchmarks.harness.suite import add_options


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


def test_a_cell_is_written_at_once_and_can_go_elsewhere(results, tmp_path):
    results().add("new", {"status": "ok"})
    assert list(json.loads((tmp_path / "results.json").read_text())["cells"]) == ["known", "broken", "new"]
    before = (tmp_path / "results.json").read_text()
    results("--output", str(tmp_path / "other.json")).add("newer", {"status": "ok"})
    assert "newer" in json.loads((tmp_path / "other.json").read_text())["cells"]
    assert (tmp_path / "results.json").read_text() == before


def test_results_are_compared_cell_by_cell():
    def step(ms: float, least: float, most: float) -> dict:
        return {"step_ms": ms, "step_ms_min": least, "step_ms_max": most, "peak_gib": 2.0}

    def call(ms: float) -> dict:
        return {"entries": {"einsum": {"forward": {"ms": ms, "peak_bytes": None}}}}

    recorded = {"environment": {"device": "H200"}}
    before = {"cells": {"a": step(10.0, 9.0, 12.0) | recorded, "b": step(10.0, 9.0, 12.0), "c": call(1.0)}}
    now = {"cells": {"a": step(13.0, 12.5, 14.0), "b": step(12.0, 11.0, 14.0), "c": call(2.0), "d": call(1.0)}}
    rows = compared(before, now).splitlines()[4:]
    assert rows == [
        "| a | 10.000 ms | 13.000 ms | 1.30 slower | 2,048 MiB | 2,048 MiB |",
        "| b | 10.000 ms | 12.000 ms | 1.20 | 2,048 MiB | 2,048 MiB |",
        "| c einsum forward | 1.000 ms | 2.000 ms | 2.00 slower | | |",
    ]
    assert compared(before, before).startswith("Before: H200. Now: H200.")


def test_a_file_has_each_environment_once_and_gives_it_to_every_cell(tmp_path):
    first, second = {"device": "H100"}, {"device": "H200"}
    cells = {
        name: {"environment": made, "ms": 1.23456789} for name, made in (("a", first), ("b", second), ("c", first))
    }
    write(tmp_path / "a.json", {"cells": cells})
    assert (tmp_path / "a.json").read_text().count("H100") == 1
    found = load(tmp_path / "a.json")["cells"]
    assert [found[name]["environment"] for name in "abc"] == [first, second, first] and found["a"]["ms"] == 1.23457
