"""What compressed documents keep of a ranking, on a few random vectors."""

from __future__ import annotations

from argparse import Namespace

import pytest
import torch

pytest.importorskip("pylate")

from benchmarks.quality import compressed_fidelity as benchmark
from benchmarks.quality.compressed_fidelity import FORMATS, markdown
from pylate_fastmaxsim import TokenBatch

SIZES = {"queries": 3, "query_length": 6, "documents": 300, "document_length": 8, "dim": 16, "centroids": 32}


def test_shares_are_of_the_best_by_exact_scores():
    documents = TokenBatch.from_list([torch.full((1, 1), float(size)) for size in range(500)])
    collection = benchmark.Collection(TokenBatch.from_list([torch.ones(1, 1)]), documents)
    assert benchmark.best(torch.tensor([[1.0, 2.0, 2.0]]), 2)[1].tolist() == [[1, 2]]
    assert benchmark.share(torch.tensor([[1, 2], [3, 4]]), torch.tensor([[2, 1], [4, 5]])) == 0.75
    # The best is off by 39 places, then by 40, and only the first is a candidate.
    for off, kept in ((39, 1.0), (40, 0.9)):
        scores = collection.exact.clone()
        scores[0, 499] = scores[0, 499 - off] - 0.5
        assert benchmark.share(collection.rescored(scores, 10)[1], benchmark.best(collection.exact, 10)[1]) == kept


def test_finer_formats_keep_more():
    collection = benchmark.random_vectors(Namespace(**SIZES, device="cpu"))
    collection.metrics = lambda scores, positions: {"ndcg@10": 0.5}
    cells = {f"random/{format}": collection.measure(format) for format in FORMATS}
    assert cells["random/float32"]["top10"] == 1
    assert cells["random/int8"]["top100"] > cells["random/residual-4"]["top100"] > cells["random/residual-1"]["top100"]
    for cell in cells.values():
        assert cell["rescored"]["top10"] >= cell["top10"]
    assert [round(cell["bytes_per_token"], 1) for cell in cells.values()] == [64, 32, 16.5, 20, 16, 16, 12, 10]
    lines = markdown({"cells": cells}).splitlines()
    assert len(lines) == 2 + len(FORMATS) and lines[0].count("nDCG@10") == 2
    assert markdown({"cells": {}}) == ""
