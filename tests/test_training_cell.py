"""The benchmark of training steps measures batches of the size that it says, for every loss."""

from __future__ import annotations

import random
import sys
from argparse import Namespace
from pathlib import Path

import pytest

pytest.importorskip("pylate")

from pylate.utils import ColBERTCollator

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def cell():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        import training_cell

        yield training_cell
        sys.modules.pop("training_cell")


@pytest.fixture(scope="module")
def collator(cell, tmp_path_factory):
    model = cell.build_model(tmp_path_factory.mktemp("model"), layers=1, document_length=40)
    return ColBERTCollator(tokenize_fn=model.tokenize)


@pytest.mark.parametrize("tile", [None, 2])
@pytest.mark.parametrize("loss", ["contrastive", "cached_contrastive", "distillation"])
def test_a_batch_holds_so_many_queries_and_documents(cell, collator, loss, tile):
    options = Namespace(batch=5, negatives=3, loss=loss, tile=tile)
    queries, *documents = cell.collect_features(cell.make_batch(collator, options, random.Random(0)))[0]
    assert len(queries["input_ids"]) == 5
    assert [len(column["input_ids"]) for column in documents] == ([20] if loss == "distillation" else [5] * 4)
    for column in documents:
        assert column["input_ids"].shape[1] == 40 and column["attention_mask"].sum(1).max() <= 40


def test_a_teacher_scores_every_document(cell, collator):
    options = Namespace(batch=4, negatives=15, loss="distillation", tile=None)
    _, labels = cell.collect_features(cell.make_batch(collator, options, random.Random(0)))
    assert labels.shape == (4, 16)
