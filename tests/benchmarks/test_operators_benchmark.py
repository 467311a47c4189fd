"""The operator benchmark: the command on a CPU, and what its tables conclude from results."""

from __future__ import annotations

import copy
import json
from functools import partial
from pathlib import Path

import pytest
import torch
from benchmarked import run_benchmark

run = partial(run_benchmark, "operators.run")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    target = tmp_path_factory.mktemp("operators") / "tiny.json"
    run("--shapes", "tiny", "--competitors", "fast", "einsum", "--results", str(target))
    return target


def scaled_sweep(factors: list[float]) -> dict:
    """Results of a sweep over Nd whose points take ``factors`` times what linear growth from the first would."""
    import dataclasses

    from benchmarks.operators.shapes import SHAPES

    shapes = [shape for shape in SHAPES if shape.name.startswith("sweep-Nd-")][: len(factors)]
    cells = {}
    for shape, factor in zip(shapes, factors, strict=True):
        entry = {"forward": {"ms": shape.documents * factor, "peak_bytes": 0}, "errors": {}}
        cell = {"kind": "shape", "shape": dataclasses.asdict(shape), "competitor": "fast", "run": 0}
        cells[f"{shape.name}/fast"] = {**cell, "entries": {"maxsim of token batches": entry}}
    return {"runs": [], "cells": cells}


def test_every_tiny_cell_is_measured_and_exact(tiny):
    content = json.loads(tiny.read_text())
    names = ["tiny", "tiny-candidates", "tiny-ragged"]
    assert set(content["cells"]) == {"host", *(f"{n}/{c}" for n in names for c in ("fast", "einsum"))}
    assert len(content["runs"]) == 1 and content["runs"][0]["ceilings"]["copy_bytes_per_s"] > 0
    for name in names:
        shape = content["cells"][f"{name}/fast"]["shape"]
        bound = 1e-6 if shape["dtype"] == "float32" else 5e-3
        for entry in content["cells"][f"{name}/fast"]["entries"].values():
            assert set(entry["errors"]) == {"scores", "query gradient", "document gradient"}, entry["errors"]
            assert all(error < bound for error in entry["errors"].values()), entry["errors"]
            assert all(entry[m]["ms"] > 0 for m in ("forward", "forward_winners", "forward_backward"))
    assert tiny.with_name("tiny_speed.png").exists()


def test_finished_cells_are_not_measured_again(tiny):
    before = tiny.read_text()
    run("--shapes", "tiny", "--competitors", "fast", "--results", str(tiny))
    assert tiny.read_text() == before
    once = tiny.with_name("again.json")
    arguments = ["--shapes", "tiny-ragged", "--competitors", "einsum", "--again", "--output", str(once)]
    run("--results", str(tiny), *arguments)
    content = json.loads(once.read_text())
    assert [content["cells"][f"{n}/einsum"]["run"] for n in ("tiny", "tiny-ragged")] == [0, 1]
    assert tiny.read_text() == before


def test_a_failing_entry_leaves_its_sentence_and_the_others_stand():
    from benchmarks.operators.competitors import Entry, make_inputs
    from benchmarks.operators.measure import measure_entry
    from benchmarks.operators.shapes import BY_NAME

    def no_gradient(inputs):
        if inputs.queries.requires_grad:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7 GiB")
        return inputs.queries.new_zeros(3, 5)

    shape = BY_NAME["tiny"]
    result = measure_entry(Entry("broken", no_gradient), shape, [make_inputs(shape, torch.device("cpu"), 0)])
    assert result["forward"]["ms"] > 0
    assert result["forward_backward"] == {"failure": "out of memory: CUDA out of memory"}


def test_wrong_scores_and_gradients_show_in_the_errors():
    from benchmarks.operators.competitors import Entry, fast_entries, make_inputs
    from benchmarks.operators.measure import errors
    from benchmarks.operators.shapes import BY_NAME

    shape = BY_NAME["tiny"]
    inputs = make_inputs(shape, torch.device("cpu"), 0)
    right = fast_entries(shape)[0]
    doubled = errors(Entry("doubled", lambda x: 2 * right.score(x)), shape, inputs)
    assert all(error == pytest.approx(1, abs=1e-5) for error in doubled.values())
    missing = errors(Entry("not a number", lambda x: right.score(x) * torch.nan), shape, inputs)
    assert missing["scores"] is None


def test_a_step_beyond_the_trend_is_found():
    from benchmarks.operators.results import Results

    assert Results(scaled_sweep([1, 1, 1])).largest_step("Nd", "forward") == pytest.approx(1)
    assert Results(scaled_sweep([1, 1.6, 1.6])).largest_step("Nd", "forward") == pytest.approx(1.6)


def test_the_fastest_entry_counts_and_failures_are_told(tiny):
    from benchmarks.operators.results import Results
    from benchmarks.operators.table import markdown

    content = copy.deepcopy(json.loads(tiny.read_text()))
    entries = content["cells"]["tiny/einsum"]["entries"]
    (entry,) = entries.values()
    entries["faster"] = {**entry, "forward": {**entry["forward"], "ms": 1e-6}}
    results = Results(content)
    shape = next(shape for shape in results.shapes if shape.name == "tiny")
    assert results.best_peer(shape, "forward")[1]["ms"] == 1e-6
    content["cells"]["tiny/einsum"] = {**content["cells"]["tiny/einsum"], "failure": "did not fit"}
    del content["cells"]["tiny/einsum"]["entries"]
    assert "did not fit" in markdown(content)
