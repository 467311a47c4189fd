"""The benchmarks of quality, on a few vectors and a small collection, and the committed results of static models."""

from __future__ import annotations

from argparse import Namespace

import pytest
import torch

pytest.importorskip("pylate")

from benchmarks.harness.records import load
from benchmarks.harness.suite import run_suite
from benchmarks.quality import compressed_fidelity, first_stage_cranfield, static_cranfield
from benchmarks.quality.static_cranfield import BM25_CELL, ENCODER_CELL, MAXSIM_CELL, QUERY_WEIGHTS, cell_name
from pylate_fastmaxsim import TokenBatch
from tests.support.beir_folder import write_folder
from tests.support.paths import ROOT

SIZES = {"queries": 3, "query_length": 6, "documents": 300, "document_length": 8, "dim": 16, "centroids": 32}


def numbers(count: int) -> TokenBatch:
    return TokenBatch.from_list([torch.full((1, 1), float(size)) for size in range(count)])


def test_shares_of_compressed_documents_are_of_the_best_by_exact_scores():
    collection = compressed_fidelity.Collection(TokenBatch.from_list([torch.ones(1, 1)]), numbers(500))
    best, share = compressed_fidelity.best, compressed_fidelity.share
    assert best(torch.tensor([[1.0, 2.0, 2.0]]), 2)[1].tolist() == [[1, 2]]
    assert share(torch.tensor([[1, 2], [3, 4]]), torch.tensor([[2, 1], [4, 5]])) == 0.75
    # The best is off by 39 places, then by 40, and only the first is a candidate.
    for off, kept in ((39, 1.0), (40, 0.9)):
        scores = collection.exact.clone()
        scores[0, 499] = scores[0, 499 - off] - 0.5
        assert share(collection.rescored(scores, 10)[1], best(collection.exact, 10)[1]) == kept


def test_finer_formats_keep_more():
    collection = compressed_fidelity.random_vectors(Namespace(**SIZES, device="cpu"))
    collection.metrics = lambda scores, positions: {"ndcg@10": 0.5}
    cells = {f"random/{format}": collection.measure(format) for format in compressed_fidelity.FORMATS}
    assert cells["random/float32"]["top10"] == 1
    assert cells["random/int8"]["top100"] > cells["random/residual-4"]["top100"] > cells["random/residual-1"]["top100"]
    assert all(cell["rescored"]["top10"] >= cell["top10"] for cell in cells.values())
    assert [round(cell["bytes_per_token"], 1) for cell in cells.values()] == [64, 32, 16.5, 20, 16, 16, 12, 10]
    lines = compressed_fidelity.markdown({"cells": cells}).splitlines()
    assert len(lines) == 2 + len(cells) and lines[0].count("nDCG@10") == 2


def test_hard_negatives_are_the_best_without_positives():
    queries = TokenBatch.from_list([torch.ones(1, 1), -torch.ones(1, 1)])
    found = first_stage_cranfield.hard_negatives(queries, numbers(30), [{29, 3}, {0, 1, 2}])
    assert found == [{*range(19, 29)}, {*range(3, 13)}]
    assert first_stage_cranfield.share([{1, 2, 3}, {4}], torch.tensor([[2, 9], [-1, 4]])) == 0.5


def require_consistent(cells: dict[str, dict], thresholds: tuple[float, ...]) -> None:
    # Only equal tokens match: BM25.
    equal, bm25 = cells[cell_name(1.0, "BM25")], cells[BM25_CELL]
    assert equal["metrics"]["IDF"] == bm25["metrics"]["IDF"] and equal["nonzeros"] == bm25["nonzeros"]
    entries = [cells[cell_name(each)]["nonzeros"] for each in thresholds]
    assert entries == sorted(entries, reverse=True) and ENCODER_CELL in cells
    for name in (MAXSIM_CELL, cell_name(thresholds[0])):
        assert cells[name]["metrics"].keys() == QUERY_WEIGHTS.keys()


@pytest.mark.bench
def test_suites_of_cranfield_measure_what_is_missing(encoder, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    # Tokens of a small vocabulary with random vectors are closer to each other.
    changes = {"FLOOR": 0.8, "THRESHOLDS": (0.8, 0.9), "BM25_THRESHOLDS": (0.9, 1.0), "DEPTH": 31}
    for name, value in changes.items():
        monkeypatch.setattr(static_cranfield, name, value)
    results, folder = tmp_path / "results.json", encoder("bert", max_position_embeddings=512)
    options = ["--data", str(write_folder(tmp_path / "data")), "--results", str(results)]
    run_suite("static_cranfield", [*options, "--encoder", folder])
    cells = load(results)["cells"]
    require_consistent(cells, (0.8, 0.9))
    assert len(cells) == 3 + 2 + 2 and results.with_suffix(".png").exists()
    said = capsys.readouterr().out
    assert "| BM25 |" in said
    monkeypatch.setattr(static_cranfield, "Measured", lambda task: pytest.fail("measured again"))
    run_suite("static_cranfield", [*options, "--render"])
    assert capsys.readouterr().out.strip() in said

    monkeypatch.setattr(static_cranfield, "encoder_folder", lambda: folder)
    monkeypatch.setattr(first_stage_cranfield, "NEGATIVES", 3)
    monkeypatch.setattr(first_stage_cranfield, "EVERY", 1)
    options[-1] = str(tmp_path / "first.json")
    run_suite("first_stage_cranfield", options)
    for cell in load(tmp_path / "first.json")["cells"].values():
        for shares in (list(cell[name].values()) for name in first_stage_cranfield.QUERIES):
            # The last k is more than all documents; what shares no term with a query is not found.
            assert shares == sorted(shares) and 0.9 < shares[-1] <= 1


def test_the_committed_results_of_static_models_fit_together():
    cells = load(ROOT / "benchmarks" / "results" / "static_cranfield.json")["cells"]
    require_consistent(cells, static_cranfield.THRESHOLDS)
    assert cells[MAXSIM_CELL]["nonzeros"] == pytest.approx(30_522, rel=0.01)
