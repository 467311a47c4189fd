"""The losses benchmark: the command on a CPU, and the search for the largest batch."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
from benchmarked import run_benchmark

run = partial(run_benchmark, "losses.run")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    target = tmp_path_factory.mktemp("losses") / "tiny.json"
    run("--queries", "8", "--lengths", "12", "--paths", "stock", "fast", "--results", str(target))
    return target


def test_both_paths_have_the_same_loss_on_the_same_embeddings(tiny):
    cells = json.loads(tiny.read_text())["cells"].values()
    values = {(cell["cell"]["loss"], cell["cell"]["path"]): cell["loss_value"] for cell in cells}
    assert len(values) == 6 and all(cell["ms"] > 0 and cell["environment"]["torch"] for cell in cells)
    for loss in ("contrastive", "cached_contrastive", "distillation"):
        # Stock's scores are rounded to bfloat16, and divided by a temperature of 0.02.
        assert values[loss, "fast"] == pytest.approx(values[loss, "stock"], rel=0.05), loss


def test_a_finished_cell_is_not_measured_again_and_the_table_has_all(tiny):
    before = tiny.read_text()
    said = run("--queries", "8", "--lengths", "12", "--paths", "stock", "fast", "--results", str(tiny))
    assert tiny.read_text() == before and "embedded/path" not in said
    assert said.count("8 queries, 2 documents each") == 2 and "Distillation, 1 queries" in said


def test_two_ranks_measure_every_way_to_share_documents(tmp_path):
    target = tmp_path / "ring.json"
    said = run(
        *("--ring", "--ranks", "2", "--local-batches", "4", "--lengths", "12"),
        *("--losses", "contrastive", "--results", str(target)),
    )
    cells = json.loads(target.read_text())["cells"].values()
    assert {cell["cell"]["path"] for cell in cells} == {"local", "gathered", "ring", "ring, no winners kept"}
    assert all(cell["ms"] > 0 for cell in cells), cells
    assert "| Contrastive, 4 | ring | " in said


@pytest.mark.parametrize("limit", [31, 32, 40, 200, 300, 5000, 70_000, 2**21])
@pytest.mark.parametrize("known", [True, False])
def test_the_search_finds_the_largest_batch_that_fits(limit, known):
    from benchmarks.losses.ceiling import GRID, ceiling, next_batch

    tried = {}
    while (batch := next_batch(tried, 128, 100.0 if known else None)) is not None:
        assert batch not in tried and batch in GRID
        peak = 2 + 96 * batch / limit
        fits = batch <= limit
        tried[batch] = {"status": "ok", "peak_gib": peak if known else None} if fits else {"status": "out of memory"}
    largest, stopped = ceiling(tried)
    assert largest == max((size for size in GRID if size <= limit), default=None)
    assert (stopped is None) == (limit >= GRID[-1])
    assert len(tried) <= (7 if known else 20)


def test_the_search_ends_at_the_largest_batch_that_was_asked_for():
    from benchmarks.losses.ceiling import next_batch

    went = {"status": "ok", "peak_gib": None}
    assert next_batch({512: went}, 512, None, largest=768) == 768
    assert next_batch({512: went, 768: went}, 512, None, largest=768) is None
