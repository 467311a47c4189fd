"""The benchmark of training steps measures batches of the size that it says, for every loss."""

from __future__ import annotations

import json
import random
import sys
from argparse import Namespace

import pytest
from benchmarked import run_benchmark

pytest.importorskip("pylate")

from pylate.utils import ColBERTCollator

from pylate_fastmaxsim import _winners
from pylate_fastmaxsim.integrations.pylate import losses as pylate_losses


@pytest.fixture(scope="module")
def cell():
    from benchmarks.training import cell

    return cell


@pytest.fixture(scope="module")
def collator(cell, tmp_path_factory):
    model = cell.build_model(tmp_path_factory.mktemp("model"), layers=1, document_length=40)
    return ColBERTCollator(tokenize_fn=model.tokenize)


@pytest.mark.parametrize("tile", [None, 2])
@pytest.mark.parametrize("loss", ["contrastive", "cached_contrastive", "distillation"])
def test_a_batch_holds_so_many_queries_and_documents(cell, collator, loss, tile):
    options = Namespace(batch=5, negatives=3, loss=loss, tile=tile, mean_tokens=30)
    queries, *documents = cell.collect_features(cell.make_batch(collator, options, random.Random(0)))[0]
    assert len(queries["input_ids"]) == 5
    assert [len(column["input_ids"]) for column in documents] == ([20] if loss == "distillation" else [5] * 4)
    for column in documents:
        assert column["input_ids"].shape[1] == 40 and column["attention_mask"].sum(1).max() <= 40


def test_documents_have_the_mean_that_is_asked_for_until_they_are_cut(cell, collator):
    def lengths(mean_tokens):
        options = Namespace(batch=200, negatives=0, loss="contrastive", tile=None, mean_tokens=mean_tokens)
        _, documents = cell.collect_features(cell.make_batch(collator, options, random.Random(0)))[0]
        return documents["attention_mask"].sum(1)

    assert lengths(12).double().mean() == pytest.approx(12, rel=0.1)
    assert (lengths(3000) == 40).all()


def test_a_teacher_scores_every_document(cell, collator):
    options = Namespace(batch=4, negatives=15, loss="distillation", tile=None, mean_tokens=30)
    _, labels = cell.collect_features(cell.make_batch(collator, options, random.Random(0)))
    assert labels.shape == (4, 16)


def measured(*options: str) -> list[dict]:
    small = ["--path", "fast", "--layers", "1", "--batches", "1", "--warmup", "1"]
    lines = run_benchmark("training.cell", *small, *options).splitlines()
    return [json.loads(line.removeprefix("RESULT ")) for line in lines if line.startswith("RESULT ")]


def test_ranks_train_together_and_one_says_how_long_it_took():
    [result] = measured("--batch", "4", "--ranks", "2", "--steps", "2")
    assert result["status"] == "ok" and result["steps"] == len(result["each_ms"]) == 2
    # As PyLate does with negatives of all ranks, each returns its loss times their number.
    assert result["losses"][0] > measured("--batch", "4", "--steps", "1")[0]["losses"][0]


def test_steps_of_several_lengths_are_measured_drawn_and_kept(tmp_path):
    results = tmp_path / "lengths.json"
    small = [
        "--batch",
        "2",
        "--compile",
        "no",
        "--document-length",
        "30",
        "--layers",
        "1",
        "--warmup",
        "1",
        "--steps",
        "1",
    ]

    def run(*options):
        return run_benchmark("training.lengths", "--results", str(results), *options).splitlines()

    *_, half, full = run(*small, "--tokens", "15", "3000")
    assert full.startswith("| 0% | ") and "x) |" in full and half.startswith("| ") and not half.startswith("| 0%")
    before = results.read_text()
    assert run(*small, "--tokens", "15", "3000")[-2:] == run("--render-only")[-2:] == [half, full]
    assert results.read_text() == before and (tmp_path / "lengths.png").exists()


def test_memory_is_measured_up_to_some_chunks(cell, monkeypatch, capsys):
    scored = []
    sum_of_losses = pylate_losses._sum_of_losses
    monkeypatch.setattr(pylate_losses, "_sum_of_losses", lambda *given: scored.append(given) or sum_of_losses(*given))
    monkeypatch.setattr(_winners, "_AT_ONCE_BYTES", 0)
    monkeypatch.setenv("PYLATE_SCORES_BACKEND", "auto")
    small = ["--path", "fast", "--layers", "1", "--batches", "1", "--warmup", "1", "--warmup-rows", "2"]
    loss = ["--loss", "cached_contrastive", "--batch", "8", "--mini-batch", "2", "--document-length", "5"]
    monkeypatch.setattr(sys, "argv", ["cell.py", *small, *loss, "--chunks", "3"])
    cell.main()
    assert json.loads(capsys.readouterr().out.removeprefix("RESULT "))["chunks"] == 3
    assert len(scored) == 1 + 3  # of the step before, which has 2 rows, and of this one
