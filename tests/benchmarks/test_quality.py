import pytest

pytest.importorskip("pylate")

from benchmarks.harness.records import load
from benchmarks.harness.suite import run_suite
from benchmarks.quality import compressed_fidelity, first_stage_cranfield, static_cranfield
from benchmarks.quality.static_cranfield import BM25_CELL, ENCODER_CELL, MAXSIM_CELL, QUERY_WEIGHTS, cell_name
from tests.support.beir_folder import write_folder


@pytest.mark.bench
def test_suites_of_cranfield_measure_what_is_missing(encoder, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    # Tokens of a small vocabulary with random vectors are closer to each other.
    changes = {"THRESHOLDS": (0.8, 0.9), "VALUE_THRESHOLDS": (0.9, 1.0), "DEPTH": 31}
    changes["HOSTED"] = {"as made": (1, ()), "trained, two tables": (2, (0,))}
    for name, value in changes.items():
        monkeypatch.setattr(static_cranfield, name, value)
    results, folder = tmp_path / "results.json", encoder("bert", max_position_embeddings=512)
    data = str(write_folder(tmp_path / "data"))
    options = ["--data", data, "--encoder", folder, "--results", str(results)]
    run_suite("static_cranfield", options)
    cells = load(results)["cells"]
    # Only equal tokens match: BM25.
    equal, bm25 = cells[cell_name(1.0, "BM25")], cells[BM25_CELL]
    assert equal["metrics"]["IDF"] == bm25["metrics"]["IDF"] and equal["nonzeros"] == bm25["nonzeros"]
    assert cells[cell_name(0.8)]["nonzeros"] >= cells[cell_name(0.9)]["nonzeros"] and ENCODER_CELL in cells
    for name in (MAXSIM_CELL, cell_name(0.8)):
        assert cells[name]["metrics"].keys() == QUERY_WEIGHTS.keys()
    made, trained = (cells[name]["metrics"] for name in changes["HOSTED"])
    assert made["MaxSim"] == cells[MAXSIM_CELL]["metrics"]["none"] and made["mean"] != trained["mean"]
    assert len(cells) == 3 + 2 + 3 * 2 + 2
    said = capsys.readouterr().out
    assert "\n| BM25 | " in said and "\n| threshold=0.9/BM25 | " in said
    monkeypatch.setattr(static_cranfield, "Measured", lambda task: pytest.fail("measured again"))
    run_suite("static_cranfield", [*options, "--render"])
    assert capsys.readouterr().out.strip() in said

    monkeypatch.setattr(first_stage_cranfield, "NEGATIVES", 3)
    monkeypatch.setattr(first_stage_cranfield, "EVERY", 1)
    options[-1] = str(tmp_path / "first.json")
    run_suite("first_stage_cranfield", options)
    for cell in load(tmp_path / "first.json")["cells"].values():
        for shares in (list(cell[name].values()) for name in first_stage_cranfield.QUERIES):
            # The last k is more than all documents; what shares no term with a query is not found.
            assert shares == sorted(shares) and 0.9 < shares[-1] <= 1

    monkeypatch.setattr(compressed_fidelity, "CENTROIDS", 32)
    options[-1] = str(tmp_path / "fidelity.json")
    run_suite("compressed_fidelity", options)
    cells = load(tmp_path / "fidelity.json")["cells"]
    assert [round(cell["bytes_per_token"], 1) for cell in cells.values()] == [128, 64, 32.1, 36, 32, 24, 16, 12]
    shares = [cells[f"cranfield/{format}"]["top10"] for format in ("float32", "int8", "residual-4", "residual-1")]
    assert shares[0] == 1 and shares == sorted(shares, reverse=True)
    assert all(cell["rescored"]["top10"] >= cell["top10"] for cell in cells.values())
