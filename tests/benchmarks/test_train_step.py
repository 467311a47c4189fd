"""Cells of training steps: batches of the size that they say, for every loss, and the suites on a CPU."""

from __future__ import annotations

import random
from argparse import ArgumentParser

import pytest

from tests.support.benchmarked import run_benchmark

pytest.importorskip("pylate")

from pylate.utils import ColBERTCollator

from benchmarks.harness.records import load
from benchmarks.training import train_step
from benchmarks.training.ceilings import GRID, ceiling, next_batch
from benchmarks.training.encoder import build_model

pytestmark = pytest.mark.bench
SMALL = ["--layers", "1", "--different", "1", "--warmup", "1", "--compile", "no"]


@pytest.fixture(scope="module")
def collator(tmp_path_factory):
    model = build_model(tmp_path_factory.mktemp("model"), layers=1, document_length=40)
    return ColBERTCollator(tokenize_fn=model.tokenize)


def features(collator, **options) -> tuple:
    defaults = {"negatives": 0, "loss": "contrastive", "tile": None, "mean_tokens": 30}
    return train_step.collect_features(train_step.make_batch(collator, {**defaults, **options}, random.Random(0)))


@pytest.mark.parametrize("tile", [None, 2])
@pytest.mark.parametrize("loss", ["contrastive", "distillation"])
def test_a_batch_holds_so_many_queries_and_documents(collator, loss, tile):
    (queries, *documents), labels = features(collator, batch=5, negatives=3, loss=loss, tile=tile)
    assert len(queries["input_ids"]) == 5
    assert [len(column["input_ids"]) for column in documents] == ([20] if loss == "distillation" else [5] * 4)
    assert labels is None if loss == "contrastive" else labels.shape == (5, 4)
    for column in documents:
        assert column["input_ids"].shape[1] == 40 and column["attention_mask"].sum(1).max() <= 40


def test_documents_have_the_mean_that_is_asked_for_until_they_are_cut(collator):
    def lengths(mean_tokens):
        return features(collator, batch=200, mean_tokens=mean_tokens)[0][1]["attention_mask"].sum(1)

    assert lengths(12).double().mean() == pytest.approx(12, rel=0.1)
    assert (lengths(3000) == 40).all()


def cell_of(*options: str) -> dict:
    """The one cell that the suite has with some options."""
    parser = ArgumentParser()
    train_step.add_options(parser)
    given = [*SMALL, "--checkpointing", "no", "--paths", "fast", *options]
    (cell,) = train_step.cells(parser.parse_args(given)).values()
    return cell


def test_ranks_train_together_and_one_says_how_long_it_took(tmp_path):
    small = [*SMALL, "--checkpointing", "no", "--paths", "fast", "--batches", "4"]
    run_benchmark("train_step", *small, "--ranks", "2", "--steps", "2", "--results", str(tmp_path / "two.json"))
    (result,) = load(tmp_path / "two.json")["cells"].values()
    assert result["status"] == "ok" and result["steps"] == len(result["each_ms"]) == 2
    # As PyLate does with negatives of all ranks, each returns its loss times their number.
    assert result["losses"][0] > train_step.measure(cell_of("--batches", "4", "--steps", "1"))["losses"][0]


@pytest.mark.parametrize("limit", [31, 32, 300, 2**21])
def test_the_search_finds_the_largest_batch_that_fits(limit):
    tried = {}
    while (batch := next_batch(tried)) is not None:
        assert batch not in tried and batch in GRID
        tried[batch] = {"status": "ok" if batch <= limit else "out of memory"}
    largest, stopped = ceiling(tried)
    assert largest == max((size for size in GRID if size <= limit), default=None)
    assert (stopped is None) == (limit >= GRID[-1]) and len(tried) <= 5
