"""The benchmarks of quality, on a few vectors and a small collection, and the checks of the study of pooling."""

from argparse import Namespace

import pytest
import torch

pytest.importorskip("pylate")

from benchmarks.harness.records import load
from benchmarks.harness.suite import run_suite
from benchmarks.quality import compressed_fidelity, first_stage_cranfield, static_cranfield
from benchmarks.quality.pooling_study import INJECTED, KINDS, LENGTHS, Cell
from benchmarks.quality.pooling_study import cells as cells_of
from benchmarks.quality.pooling_study_report import QUERIES, checks, checks_table
from benchmarks.quality.static_cranfield import BM25_CELL, ENCODER_CELL, MAXSIM_CELL, QUERY_WEIGHTS, cell_name
from pylate_fastmaxsim import TokenBatch
from tests.support.beir_folder import write_folder


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
    sizes = {"queries": 3, "query_length": 6, "documents": 300, "document_length": 8, "dim": 16, "centroids": 32}
    collection = compressed_fidelity.random_vectors(Namespace(**sizes, device="cpu"))
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
    # Only equal tokens match: BM25.
    equal, bm25 = cells[cell_name(1.0, "BM25")], cells[BM25_CELL]
    assert equal["metrics"]["IDF"] == bm25["metrics"]["IDF"] and equal["nonzeros"] == bm25["nonzeros"]
    assert cells[cell_name(0.8)]["nonzeros"] >= cells[cell_name(0.9)]["nonzeros"] and ENCODER_CELL in cells
    for name in (MAXSIM_CELL, cell_name(0.8)):
        assert cells[name]["metrics"].keys() == QUERY_WEIGHTS.keys()
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


RECALL = {"max": (0.7, 0.4, 0.1, 0.02), "top-4": (0.5, 0.5, 0.2, 0.05), "softmax": (0.2, 0.2, 0.1, 0.03)}
GINI = {"max": 0.78, "top-4": 0.45, "softmax": 0.18}


def as_published() -> dict:
    found = {}
    for each in cells_of(Namespace(quick=False, seeds=[0, 1])).values():
        cell = Cell(**each["cell"])
        recall = dict(zip(map(str, LENGTHS), RECALL[cell.pooling], strict=True))
        kinds = {kind: {str(k): {"others": 0.1, "all": 0.4, "hijacked": 0.5} for k in INJECTED} for kind in KINDS}
        found[cell.name] = {
            "cell": vars(cell),
            "recall": dict.fromkeys(QUERIES, recall),
            "gini": {"score": [GINI[cell.pooling]] * 3, "loss": [0.5] * 3},
            "injection": dict.fromkeys(QUERIES, {"none": 0.5, **kinds}),
        }
    return found


def test_checks_hold_only_where_all_is_as_published():
    found = checks(as_published())
    failed = [(check.reading, bool(check.held_to)) for check in found if not check.passed]
    assert len(found) == 12 and failed == [("gradient of the loss", False)] * 2
    assert "| **gradient of the score** | yes | 0.780 / 0.450 / 0.180 |" in checks_table({"cells": as_published()})
    for pooling, part, of, place, value, broken in (
        ("max", "gini", "score", -1, 0.65, "Gini"),
        ("top-4", "gini", "score", 0, 0.79, "max above top-4"),  # one epoch of one seed
        ("max", "recall", "training", "256", 0.2, "max ahead"),
        ("softmax", "recall", "training", "64", 0.9, "softmax lowest"),
    ):
        cells = as_published()
        cells[Cell(pooling, 64, 16, seed=1).name][part][of][place] = value
        failed = [check.published for check in checks(cells) if check.held_to and not check.passed]
        assert [each.startswith(broken) for each in failed] == [True]
    # What is not measured yet is left out.
    assert len(checks({name: cell for name, cell in as_published().items() if "/M=64/d=16/" in name})) == 8
