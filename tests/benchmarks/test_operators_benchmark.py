"""The operator benchmark: the command on a CPU, and what its tables conclude from results."""

from __future__ import annotations

import json

import pytest
import torch
from benchmarked import run_benchmark
from benchmarks.operators.worker import run_cell

from benchmarks.operators.competitors import Entry, fast_entries, make_inputs
from benchmarks.operators.measure import errors, measure_entry
from benchmarks.operators.shapes import BY_NAME


@pytest.mark.parametrize("name", ["tiny", "tiny-candidates", "tiny-ragged"])
def test_tiny_shapes_are_exact(name):
    shape = BY_NAME[name]
    for competitor in ("fast", "einsum"):
        for entry in run_cell(shape, competitor, torch.device("cpu"))["entries"].values():
            assert set(entry["errors"]) == {"scores", "query gradient", "document gradient"}, entry["errors"]
            bound = 1e-6 if shape.dtype == "float32" else 5e-3
            assert all(error < bound for error in entry["errors"].values()), entry["errors"]
            assert all(entry[m]["ms"] > 0 for m in ("forward", "forward_winners", "forward_backward"))


@pytest.mark.bench
@pytest.mark.smoke
def test_the_command_measures_every_cell(tmp_path):
    results = tmp_path / "tiny.json"
    run_benchmark("operators.run", "--shapes", "tiny", "--competitors", "einsum", "--results", str(results))
    content = json.loads(results.read_text())
    assert list(content["cells"]) == ["tiny/einsum", "tiny-candidates/einsum", "tiny-ragged/einsum"]
    assert len(content["runs"]) == 1 and content["runs"][0]["ceilings"]["copy_bytes_per_s"] > 0
    assert (tmp_path / "tiny_speed.png").exists()


def test_a_failing_entry_leaves_its_sentence_and_the_others_stand():
    def no_gradient(inputs):
        if inputs.queries.requires_grad:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7 GiB")
        return inputs.queries.new_zeros(3, 5)

    shape = BY_NAME["tiny"]
    result = measure_entry(Entry("broken", no_gradient), shape, [make_inputs(shape, torch.device("cpu"), 0)])
    assert result["forward"]["ms"] > 0
    assert result["forward_backward"] == {"failure": "out of memory: CUDA out of memory"}


def test_wrong_scores_and_gradients_show_in_the_errors():
    shape = BY_NAME["tiny"]
    inputs = make_inputs(shape, torch.device("cpu"), 0)
    right = fast_entries(shape)[0]
    doubled = errors(Entry("doubled", lambda x: 2 * right.score(x)), shape, inputs)
    assert all(error == pytest.approx(1, abs=1e-5) for error in doubled.values())
    missing = errors(Entry("not a number", lambda x: right.score(x) * torch.nan), shape, inputs)
    assert missing["scores"] is None
