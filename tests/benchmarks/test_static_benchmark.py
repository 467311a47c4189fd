"""The benchmark of static documents: its vectors have the neighbours that it says, and the command runs on a CPU."""

from __future__ import annotations

import json

import pytest
import torch
from benchmarked import run_benchmark

from benchmarks.retrieval.static_documents import markdown, token_ids, token_vectors


def test_tokens_have_the_neighbours_that_are_planted():
    vectors = torch.nn.functional.normalize(token_vectors(3000, torch.device("cpu")), dim=1)
    similarities = vectors @ vectors.T
    assert 8 < float((similarities > 0.5).sum(dim=1).float().median()) < 12
    assert 35 < float((similarities > 0.4).sum(dim=1).float().median()) < 45
    assert token_ids(70, 3000).lengths.tolist() == [60] * 70


@pytest.mark.bench
def test_the_command_makes_the_same_vectors_both_ways(tmp_path):
    target = tmp_path / "tiny.json"
    options = ("--documents", "600", "--vocabulary", "800", "--results", str(target))
    printed = run_benchmark("retrieval.static_documents", *options)
    content = json.loads(target.read_text())
    for cell in content["cells"].values():
        assert cell["maxsim"]["difference"] < 1e-6 and cell["documents"]["entries_per_document"] > 60
    assert markdown(content) in printed
