"""The trainings with each pooling on a small collection: a cell, what is resumed, and the tables."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("pylate")

from benchmarks.quality import pooling_cranfield as benchmark
from benchmarks.quality.pooling_cranfield_table import markdown

SETTINGS = {**benchmark.SETTINGS, "steps": 2, "batch_size": 4, "document_length": 16, "query_length": 8}


@pytest.fixture
def collection(tmp_path: Path) -> Path:
    """Twelve documents, one of them without a text, and two queries, of which one is judged."""
    folder = tmp_path / "collection"
    folder.mkdir()
    words = [
        "boundary",
        "layer",
        "shock",
        "wave",
        "heat",
        "transfer",
        "slender",
        "wing",
        "body",
        "flow",
        "plate",
        "jet",
    ]
    documents = [
        {"_id": f"d{i}", "title": f"{word} {i}", "text": " ".join(words[i:] + words[:i])}
        for i, word in enumerate(words)
    ]
    documents[3]["text"] = ""
    for name, rows in {
        "corpus": documents,
        "queries": [{"_id": "2", "text": "of nothing"}, {"_id": "1", "text": "slender wing"}],
    }.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    judgements = ["query-id\tcorpus-id\tscore", "1\td6\t3", "1\td7\t1", "2\td0\t0"]
    (folder / "qrels.tsv").write_text("\n".join([*judgements, ""]))
    return folder


def test_the_collection_is_read(collection):
    documents, pairs, queries, grades = benchmark.read_collection(collection)
    assert len(documents) == 12 and documents[3] == "wave 3" and documents[0].startswith("boundary 0 boundary layer")
    assert len(pairs["query"]) == len(pairs["positive"]) == 11 and "wave 3" not in pairs["query"]
    assert queries == ["slender wing"]
    assert grades.shape == (1, 12) and grades[0, 6:8].tolist() == [3, 1] and float(grades.sum()) == 4


@pytest.mark.bench
def test_a_cell_trains_and_is_evaluated(collection, encoder, monkeypatch):
    monkeypatch.setattr(benchmark, "PAIRS", 5)
    cells = {}
    for pooling in ("max", "softmax 1.0"):
        cell = {"pooling": pooling, "seed": 1}
        result = benchmark.run(cell, collection, Path(encoder("bert")), SETTINGS)
        json.dumps(result)
        cells[benchmark.name_of(cell)] = {"cell": cell, "status": "ok", **result}
        assert len(result["losses"]) == 2 and all(map(torch.isfinite, torch.tensor(result["losses"])))
        assert [row["step"] for row in result["gradient_concentration"]] == [0, 1, 2]
        assert {row["score_documents"] for row in result["gradient_concentration"]} == {5}
        # Documents as long as they are, and without injected tokens, are those that were ranked.
        for sweep in (result["lengths"], result["injection"]):
            for scored, ranked in result["after"].items():
                unchanged = next(row for row in sweep if row["pooling"] == scored)
                assert unchanged["ndcg@10"] == pytest.approx(ranked["ndcg@10"], abs=1e-5)
    assert set(cells["max/seed=1"]["after"]) == {"own"} and set(cells["softmax 1.0/seed=1"]["after"]) == {"own", "max"}
    first, second = (cell["gradient_concentration"][0]["score_gini"] for cell in cells.values())
    assert first > second > 0
    # Before the training both have the same weights.
    assert cells["max/seed=1"]["before"]["own"] == cells["softmax 1.0/seed=1"]["before"]["max"]
    assert cells["max/seed=1"]["losses"][0] != pytest.approx(cells["softmax 1.0/seed=1"]["losses"][0], rel=1e-3)
    lines = markdown(cells).splitlines()
    assert sum(line.startswith("| max |") for line in lines) == 2
    assert sum(line.startswith("| softmax 1.0 |") for line in lines) == 3


def test_cells_are_resumed_and_failures_are_tried_again(collection, tmp_path, monkeypatch, capsys):
    asked = []

    class Answers:
        def __init__(self, command, timeout, **variables):
            assert command[2] == "--worker"

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def ask(self, cell):
            asked.append(benchmark.name_of(cell))
            return {"failure": "broke"} if len(asked) == 1 else {"after": {"own": {"ndcg@10": 0.5}}, "seconds": 1}

    results = tmp_path / "results.json"
    options = ["--data", str(collection), "--encoder", "x", "--results", str(results), "--poolings", "max", "top-4"]
    monkeypatch.setattr(benchmark, "Worker", Answers)
    monkeypatch.setattr(benchmark, "markdown", lambda cells: f"{len(cells)} cells")
    for expected in (["max/seed=0", "top-4/seed=0"], ["max/seed=0"], []):
        asked_before = len(asked)
        monkeypatch.setattr(sys, "argv", ["pooling_cranfield", *options, "--seeds", "0"])
        benchmark.main()
        assert asked[asked_before:] == expected
    assert "broke" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["pooling_cranfield", *options, "--steps", "3"])
    with pytest.raises(SystemExit, match="other settings"):
        benchmark.main()
