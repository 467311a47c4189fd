"""Cells of training steps: batches of the size that they say, for every loss, and the commands on a CPU."""

from __future__ import annotations

import json
import random
import sys
from argparse import Namespace

import pytest
from benchmarked import run_benchmark

pytest.importorskip("pylate")

from pylate.utils import ColBERTCollator

from benchmarks.training import cell
from pylate_fastmaxsim import _winners
from pylate_fastmaxsim.integrations.pylate import losses as pylate_losses

pytestmark = pytest.mark.bench
SMALL = ["--layers", "1", "--batches", "1", "--warmup", "1"]


@pytest.fixture(scope="module")
def collator(tmp_path_factory):
    model = cell.build_model(tmp_path_factory.mktemp("model"), layers=1, document_length=40)
    return ColBERTCollator(tokenize_fn=model.tokenize)


def features(collator, **options) -> tuple:
    defaults = {"negatives": 0, "loss": "contrastive", "tile": None, "mean_tokens": 30}
    return cell.collect_features(cell.make_batch(collator, Namespace(**{**defaults, **options}), random.Random(0)))


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


@pytest.fixture
def measured(monkeypatch, capsys):
    """``measured(*options)``: what a cell of the fast path reports, measured in this process."""

    def run(*options: str) -> dict:
        monkeypatch.setenv("PYLATE_SCORES_BACKEND", "auto")
        monkeypatch.setattr(sys, "argv", ["cell", "--path", "fast", *SMALL, *options])
        cell.main()
        return json.loads(capsys.readouterr().out.removeprefix("RESULT "))

    return run


def test_ranks_train_together_and_one_says_how_long_it_took(measured):
    said = run_benchmark("training.cell", "--path", "fast", *SMALL, "--batch", "4", "--ranks", "2", "--steps", "2")
    [result] = [json.loads(line[7:]) for line in said.splitlines() if line.startswith("RESULT ")]
    assert result["status"] == "ok" and result["steps"] == len(result["each_ms"]) == 2
    # As PyLate does with negatives of all ranks, each returns its loss times their number.
    assert result["losses"][0] > measured("--batch", "4", "--steps", "1")["losses"][0]


def test_steps_by_padding_are_measured_and_drawn(tmp_path):
    small = [*SMALL, "--batch", "2", "--compile", "no", "--document-length", "30", "--steps", "1", "--tokens", "15"]
    *_, row = run_benchmark("training.lengths", "--results", str(tmp_path / "lengths.json"), *small).splitlines()
    assert row.startswith("| ") and "x) |" in row and (tmp_path / "lengths.png").exists()


def test_memory_is_measured_up_to_some_chunks(measured, monkeypatch):
    scored = []
    sum_of_losses = pylate_losses._sum_of_losses
    monkeypatch.setattr(pylate_losses, "_sum_of_losses", lambda *given: scored.append(given) or sum_of_losses(*given))
    monkeypatch.setattr(_winners, "_AT_ONCE_BYTES", 0)
    small = ["--warmup-rows", "2", "--batch", "8", "--mini-batch", "2", "--document-length", "5"]
    assert measured("--loss", "cached_contrastive", *small, "--chunks", "3")["chunks"] == 3
    assert len(scored) == 1 + 3  # of the step before, which has 2 rows, and of this one
