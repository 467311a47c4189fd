import random

import pytest

from benchmarks.training import train_step
from benchmarks.training.ceilings import GRID, ceiling, next_batch
from benchmarks.training.encoder import build_model


@pytest.mark.bench
def test_a_batch_holds_so_many_queries_and_documents(tmp_path):
    utils = pytest.importorskip("pylate.utils")
    collator = utils.ColBERTCollator(tokenize_fn=build_model(tmp_path, layers=1, document_length=40).tokenize)

    def features(**options) -> tuple:
        cell = {"negatives": 0, "loss": "contrastive", "tile": None, "mean_tokens": 30, **options}
        return train_step.collect_features(train_step.make_batch(collator, cell, random.Random(0)))

    for tile in (None, 2):
        for loss, sizes in (("contrastive", [5] * 4), ("distillation", [20])):
            (queries, *documents), labels = features(batch=5, negatives=3, loss=loss, tile=tile)
            assert len(queries["input_ids"]) == 5
            assert [len(column["input_ids"]) for column in documents] == sizes
            assert labels is None if loss == "contrastive" else labels.shape == (5, 4)
            assert all(column["attention_mask"].shape[1] == 40 for column in documents)
    # Lengths have the mean that is asked for until they are cut.
    short, long = (features(batch=200, mean_tokens=mean)[0][1]["attention_mask"].sum(1) for mean in (12, 3000))
    assert short.double().mean() == pytest.approx(12, rel=0.1) and (long == 40).all()


@pytest.mark.parametrize("limit", [31, 32, 300, 2**21])
def test_the_search_finds_the_largest_batch_that_fits(limit):
    tried = {}
    while (batch := next_batch(tried)) is not None:
        assert batch not in tried and batch in GRID
        tried[batch] = {"status": "ok" if batch <= limit else "out of memory"}
    largest, stopped = ceiling(tried)
    assert largest == max((size for size in GRID if size <= limit), default=None)
    assert (stopped is None) == (limit >= GRID[-1]) and len(tried) <= 5
