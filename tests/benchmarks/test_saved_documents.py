"""The benchmark of saved documents: its cells keep documents as they say, and the command runs on a CPU."""

from __future__ import annotations

import json

import pytest
from benchmarked import run_benchmark

pytestmark = pytest.mark.bench


def test_the_command_measures_both_ways(tmp_path):
    pytest.importorskip("pylate")
    target = tmp_path / "saved.json"
    options = ["--layers", "1", "--batches", "--cached", "4", "--output", str(target)]
    printed = run_benchmark("training.saved_documents", *options)
    content = json.loads(target.read_text())
    assert list(content["steps"]) == ["GradCache, 4"]
    for ways in content["steps"].values():
        assert list(ways) == ["as they are", "as int8"]
        assert all(result["status"] == "ok" and result["step_ms"] > 0 for result in ways.values())
    assert "| GradCache, 4 | as int8 |" in printed and "| MaxSim alone, 4 x 8 | as int8 | | |" in printed


def test_the_losses_of_a_cell_save_documents_as_it_says(monkeypatch):
    pytest.importorskip("pylate")
    from benchmarks.training import cell, saved_documents
    from pylate_fastmaxsim.integrations.pylate import losses

    monkeypatch.setattr(losses, "maxsim", losses.maxsim)
    monkeypatch.setenv("PYLATE_SCORES_BACKEND", "auto")
    monkeypatch.setattr("sys.argv", ["saved_documents"])
    seen = []
    monkeypatch.setattr(cell, "main", lambda: seen.append(losses.maxsim.keywords))
    for saved in saved_documents.SAVED:
        saved_documents.run_cell(saved, [])
    assert seen == [{"save_documents": None}, {"save_documents": "int8"}]
