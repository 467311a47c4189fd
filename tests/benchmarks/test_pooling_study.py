"""The synthetic study of pooling: its data and its checks."""

from __future__ import annotations

import copy
from argparse import Namespace

import pytest

from benchmarks.quality.pooling_study import INJECTED, KINDS, LENGTHS, POOLINGS, Cell, Concepts, generator
from benchmarks.quality.pooling_study import cells as cells_of
from benchmarks.quality.pooling_study_report import QUERIES, checks, checks_table, plot

RECALL = {"max": (0.7, 0.4, 0.1, 0.02), "top-4": (0.5, 0.5, 0.2, 0.05), "softmax": (0.2, 0.2, 0.1, 0.03)}
GINI = {"max": 0.78, "top-4": 0.45, "softmax": 0.18}


@pytest.mark.parametrize("dimension", [16, 128])
def test_positives_share_concepts_and_documents_of_other_lengths_too(dimension):
    concepts = Concepts(dimension, seed=0)
    pairs = concepts.pairs(200, 64, generator(0, 1))
    nearest = (pairs.documents @ concepts.vectors.T).argmax(-1)
    assert (nearest[:, :8] == pairs.wanted[:, :8]).double().mean() > 0.95
    assert (nearest[:, 8:16] == pairs.wanted[:, 8:]).double().mean() < 0.05
    # The noise is as long in 128 dimensions as in 16.
    own = (pairs.queries * concepts.vectors[pairs.wanted]).sum(-1).mean()
    assert own == pytest.approx(1 / (1 + 16 * 0.1**2) ** 0.5, abs=0.01)
    for tokens in LENGTHS:
        other, shared = concepts.of_length(pairs, tokens, generator(0, 3)).documents, min(tokens, 64)
        assert other.shape == (200, tokens, dimension)
        assert other[:, :shared].equal(pairs.documents[:, :shared])


@pytest.fixture
def cells() -> dict:
    """Results as published, of two seeds."""
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
    return copy.deepcopy(found)


def test_checks_hold_only_where_all_is_as_published(cells, tmp_path):
    def failing() -> list[str]:
        return [check.published for check in checks(cells) if check.held_to and not check.passed]

    plot({"cells": cells}, tmp_path / "study.json")
    assert len(list(tmp_path.glob("study_*.png"))) == 3
    assert len(checks(cells)) == 12 and failing() == []
    assert [check.reading for check in checks(cells) if not check.passed] == ["gradient of the loss"] * 2
    assert "| **gradient of the score** | yes | 0.780 / 0.450 / 0.180 |" in checks_table({"cells": cells})
    name = {pooling: Cell(pooling, 64, 16, seed=1).name for pooling in POOLINGS}
    whole = cells
    for pooling, key, place, value, broken in (
        ("max", ("gini", "score"), -1, 0.65, "Gini"),
        ("top-4", ("gini", "score"), 0, 0.79, "max above top-4"),  # one epoch of one seed
        ("max", ("recall", "training"), "256", 0.2, "max ahead"),
        ("softmax", ("recall", "training"), "64", 0.9, "softmax lowest"),
    ):
        cells = copy.deepcopy(whole)
        cells[name[pooling]][key[0]][key[1]][place] = value
        assert [check.startswith(broken) for check in failing()] == [True]
    # What is not measured yet is left out.
    cells = {name: cell for name, cell in whole.items() if "/M=64/d=16/" in name}
    assert len(checks(cells)) == 8
