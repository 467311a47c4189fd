"""The benchmark of the projection: errors against float64, and the command on a CPU."""

import json

import pytest
import torch
from benchmarked import run_benchmark
from benchmarks.operators.projection import measure
from benchmarks.operators.projection_entries import SHAPES


@pytest.mark.parametrize("shape", ["tiny", "tiny-candidates"])
def test_tiny_shapes_are_exact(shape):
    for entry in ("fast", "einsum"):
        cell = measure(SHAPES[shape], entry, torch.device("cpu"))
        assert set(cell["errors"]) == {"scores", "query gradient", "hidden gradient", "weight gradient"}
        assert all(error < 1e-6 for error in cell["errors"].values()), entry
        assert cell["forward"]["ms"] > 0 and cell["forward_backward"]["ms"] > 0


@pytest.mark.bench
def test_the_command_measures_a_shape(tmp_path):
    target = tmp_path / "head.json"
    printed = run_benchmark("operators.projection", "--shapes", "tiny", "--entries", "einsum", "--results", str(target))
    assert list(json.loads(target.read_text())) == ["tiny/einsum"] and "| Linear, normalize, einsum | " in printed
