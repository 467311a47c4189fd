"""The benchmark of static late interaction on Cranfield, on a small collection, and its committed results."""

from __future__ import annotations

import pytest

from benchmarks.harness.records import load
from benchmarks.harness.suite import run_suite
from benchmarks.quality import static_cranfield as benchmark
from benchmarks.quality.static_cranfield import (
    BM25_CELL,
    ENCODER_CELL,
    MAXSIM_CELL,
    QUERY_WEIGHTS,
    THRESHOLDS,
    cell_name,
)
from tests.support.beir_folder import write_folder
from tests.support.paths import ROOT


def require_consistent(cells: dict[str, dict], thresholds: tuple[float, ...]) -> None:
    # Only equal tokens match: BM25.
    assert cells[cell_name(1.0, "BM25")]["metrics"]["IDF"] == cells[BM25_CELL]["metrics"]["IDF"]
    assert cells[cell_name(1.0, "BM25")]["nonzeros"] == cells[BM25_CELL]["nonzeros"]
    entries = [cells[cell_name(each)]["nonzeros"] for each in thresholds]
    assert entries == sorted(entries, reverse=True)
    assert all(
        cells[name]["metrics"].keys() == QUERY_WEIGHTS.keys() for name in (MAXSIM_CELL, cell_name(thresholds[0]))
    )


@pytest.mark.bench
def test_it_measures_what_is_missing(encoder, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    # Tokens of a small vocabulary with random vectors are closer to each other.
    monkeypatch.setattr(benchmark, "FLOOR", 0.8)
    monkeypatch.setattr(benchmark, "THRESHOLDS", (0.8, 0.9))
    monkeypatch.setattr(benchmark, "BM25_THRESHOLDS", (0.9, 1.0))
    monkeypatch.setattr(benchmark, "DEPTH", 31)
    results = tmp_path / "results.json"
    options = [
        "--data",
        str(write_folder(tmp_path / "data")),
        "--encoder",
        encoder("bert", max_position_embeddings=512),
        "--results",
        str(results),
    ]
    run_suite("static_cranfield", options)
    cells = load(results)["cells"]
    require_consistent(cells, (0.8, 0.9))
    assert len(cells) == 3 + 2 + 2 and results.with_suffix(".png").exists()
    said = capsys.readouterr().out
    assert "The encoder's own late interaction" in said and "| BM25 |" in said
    monkeypatch.setattr(benchmark, "Measured", lambda task: pytest.fail("measured again"))
    run_suite("static_cranfield", [*options, "--render"])
    assert capsys.readouterr().out.strip() in said


def test_the_committed_results_fit_together():
    cells = load(ROOT / "benchmarks" / "results" / "static_cranfield.json")["cells"]
    require_consistent(cells, THRESHOLDS)
    assert ENCODER_CELL in cells and cells[MAXSIM_CELL]["nonzeros"] == pytest.approx(30_522, rel=0.01)
