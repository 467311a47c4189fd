"""A comparison as a table, a picture and a page."""

from __future__ import annotations

import io
import json
import math
from functools import partial

import pytest
from rich.console import Console

from pylate_fastmaxsim.comparison import report
from pylate_fastmaxsim.comparison.figures import draw_sweep
from pylate_fastmaxsim.comparison.report import (
    comparison_table,
    headline,
    sweep_rows,
    sweep_sentence,
    write_comparison,
    write_pictures,
)
from pylate_fastmaxsim.comparison.turns import Run, Turns
from pylate_fastmaxsim.comparison.verdict import contrast, summarize_turns
from pylate_fastmaxsim.recipes.comparison import compare as comparing
from pylate_fastmaxsim.reporting.figures import svg
from pylate_fastmaxsim.reporting.numbers import without_nan
from tests.support.command_line import fastmaxsim
from tests.support.comparisons import Page, steps, summarized
from tests.support.tiny_recipe import tiny, write

MEBIBYTE = 2**20
MODES = ("stock", "fast")
WALL = {"wall_seconds": {"stock": 2.0, "fast": 1.0, "whole": 4.0}}  # what compare adds to a summary


def shown(comparison: dict) -> str:
    console = Console(width=200, file=io.StringIO())
    console.print(comparison_table(comparison))
    return console.file.getvalue()


def test_a_comparison_with_a_run_out_of_memory_is_drawn(tmp_path):
    on_gpu = {"before": 100, "peak": 200, "held": 77 * MEBIBYTE}
    result = {"status": "finished", "memory": on_gpu, "ndcg@10": 0.5}
    environment = {"device": "some GPU", "device_memory": 80 * 2**30}
    fast = summarized({**result, "environment": environment}, steps([1.0] * 6, encoded=50))
    for stock in (
        summarized({"status": "out of memory"}, steps([2.0] * 3, encoded=80)),
        summarized({"status": "out of memory"}, []),
        summarized({**result, "ndcg@10": 0.4}, steps([2.0] * 6, encoded=80)),
    ):
        runs = {"stock": stock, "fast": fast}
        comparison = {"recipe": {"name": "x"}, "runs": runs, "summary": contrast(stock, fast) | WALL}
        write_pictures(comparison | {"recipe": {"name": "<script>x"}}, tmp_path / "compare.json")
        page = Page((tmp_path / "compare.html").read_text())
        assert "<script>x" in page.text and "80.0 GiB" in page.text
        table = shown(comparison)
        assert "held by PyTorch's allocator" in page.text and "held by PyTorch's allocator" in table
        assert "77 MiB" in page.text and "77 MiB" in table
        if stock["status"] == "finished":
            assert comparison["summary"]["speedup"] == 2.0 and comparison["summary"]["peak_memory"] == 1.0
            assert "2.00x as fast" in table and "+0.1000" in table and "x on some GPU" in table
        else:
            assert comparison["summary"]["speedup"] is None
            assert "out of memory" in table
    both = {"stock": stock, "fast": stock}
    assert contrast(stock, stock)["largest_loss_difference"] == 0.0
    assert "unknown device" in shown({"recipe": {"name": "x"}, "runs": both, "summary": contrast(stock, stock) | WALL})


def test_an_allocator_that_holds_much_more_than_is_used_is_spoken_of():
    for held, said in ((125, False), (126, True)):
        result = {"status": "finished", "memory": {"before": 1, "peak": 100, "held": held}, "ndcg@10": 0.5}
        run = summarized(result, steps([1.0] * 6, encoded=50))
        runs = {"stock": run, "fast": run}
        comparison = {"recipe": {"name": "x"}, "runs": runs, "summary": contrast(run, run) | WALL}
        assert ("expandable_segments:True" in shown(comparison)) == said


def test_what_was_measured_is_shown_before_it_is_drawn_whatever_its_name(tmp_path, monkeypatch):
    result = {"status": "finished", "memory": {"before": 100, "peak": 200}, "ndcg@10": None}
    run = summarized({**result}, steps([1.0] * 4, encoded=50))
    runs = {"stock": run, "fast": run}
    comparison = {"recipe": {"name": "$\\nosuch$ run"}, "runs": runs, "summary": contrast(run, run) | WALL}
    write_pictures(comparison, tmp_path / "compare.json")
    monkeypatch.setattr(comparing, "compare", lambda *arguments: comparison)
    monkeypatch.setattr(report, "write_pictures", lambda *arguments: 1 / 0)
    (tmp_path / "out").mkdir()
    done = fastmaxsim(["compare", str(write(tmp_path, tiny(tmp_path)))])
    assert isinstance(done.exception, ZeroDivisionError) and "median step" in done.stdout


@pytest.mark.parametrize(("modes", "lost"), [(("fast",), math.nan), (("stock", "fast"), math.inf)])
def test_a_loss_that_is_not_a_number_is_seen(modes, lost, tmp_path):
    result = {"status": "finished", "memory": {"before": 100, "peak": 200}, "ndcg@10": None}
    runs = {mode: summarized({**result}, steps([1.0] * 4, encoded=50)) for mode in ("stock", "fast")}
    for mode in modes:
        # Between finite ones, where max() returns the larger of those.
        runs[mode]["losses"] = [1.5, lost, 0.1, lost]
    summary = contrast(runs["stock"], runs["fast"])
    assert math.isnan(summary["largest_loss_difference"]) and summary["loss_difference_nan_from"] == 2
    comparison = without_nan({"recipe": {"name": "x"}, "runs": runs, "summary": summary | WALL})
    write_comparison(comparison, tmp_path / "compare.json")
    comparison = json.loads((tmp_path / "compare.json").read_text(), parse_constant=pytest.fail)
    assert comparison["runs"][modes[0]]["losses"] == [1.5, None, 0.1, None]
    assert comparison["summary"]["largest_loss_difference"] is None
    write_pictures(comparison, tmp_path / "compare.json")
    page = " ".join(Page((tmp_path / "compare.html").read_text()).text.split())
    for text in (page, " ".join(shown(comparison).split())):
        assert "Largest difference of the loss curves over 4 steps: NaN, first at step 2." in text
        final = text.partition("last loss")[2][:60]
        assert final.count("NaN") == len(modes) and final.count("0.2500") == 2 - len(modes)


def test_a_sweep_says_how_far_each_path_went():
    def point(batch_size, status):
        memory = {"before": 1, "peak": 2**30}
        return {"batch_size": batch_size, "status": status, "step_seconds": 0.25, "memory": memory}

    sizes = (64, 256, 1024)
    # Without a step there is nothing but the status.
    empty = {mode: [point(64, "finished"), {"batch_size": 4096, "status": "no batch of this size"}] for mode in MODES}
    assert sweep_sentence(empty).endswith(
        "Fast takes every batch tried, up to 64. No batch of 4,096 can be made of the rows."
    )
    assert sweep_rows(empty)[2] == ("4,096", *["no batch of this size", "-"] * 2)
    assert "out of memory" not in svg(partial(draw_sweep, empty, None), 8, 4)
    points = {
        "stock": list(map(point, sizes, ("finished", "out of memory", "not run"))),
        "fast": list(map(point, sizes, ("finished",) * 3)),
    }
    assert sweep_sentence(points) == (
        "Stock takes a batch of 64 and runs out of memory at 256. Fast takes every batch tried, up to 1,024."
    )
    rows = sweep_rows(points)
    assert rows[2] == ("256", "out of memory", "-", "0.250 s", "1,024 MiB")
    assert rows[3] == ("1,024", "not run", "-", "0.250 s", "1,024 MiB")
    drawn = svg(partial(draw_sweep, points, 2**31), 8, 4)
    assert drawn.count("<!-- out of memory -->") == 2


def test_a_script_has_fewer_rows_than_a_recipe(tmp_path):
    memory = {"before": 100, "peak": 200 * MEBIBYTE}
    measured = [{"loss": 0.5, "seconds": seconds} for seconds in (9.0, 1.0, 1.0)]
    runs = {mode: summarized({"status": "finished", "memory": memory}, measured) for mode in MODES}
    comparison = {"recipe": {"name": "train.py"}, "runs": runs, "summary": contrast(**runs)}
    titles = [row[0] for row in comparison_table(comparison).rows]
    assert titles == ["", "median step", "peak memory", "  before training", "last loss"]
    # As is printed where there is no rich.
    text = str(comparison_table(comparison)).split("\n")
    assert len(text) == 2 + len(titles) and len({len(line) for line in text[2:4]}) == 1
    assert text[2].split() == ["median", "step", "1.000", "s", "1.000", "s", "1.00x", "as", "fast"]
    write_pictures(comparison, tmp_path / "compare.json")
    page = Page((tmp_path / "compare.html").read_text())
    assert "wall clock" not in page.text and page.titles == ["Loss, step time and memory", "Versions", "Command"]


def test_of_a_busy_machine_there_is_no_verdict(tmp_path):
    def run(*seconds: float) -> Run:
        blocks = [{"seconds": s, "cpu_seconds": s, "steps": 3, "pair": pair} for pair, s in enumerate(seconds)]
        steps = [{"loss": 0.5}] * (3 * len(seconds))
        return Run(steps=steps, blocks=blocks, memory={"before": 1, "peak": MEBIBYTE}, device="cpu")

    comparison = {
        "recipe": {"name": "x"},
        **summarize_turns(Turns({"stock": run(2, 3, 4), "fast": run(1, 1, 1)}, True)),
    }
    assert headline(comparison) == (
        "x on unknown device: no verdict on the speed, the machine was busy, 100% of the peak memory"
    )
    write_pictures(comparison, tmp_path / "compare.json")
    for text in (" ".join(shown(comparison).split()), Page((tmp_path / "compare.html").read_text()).text):
        assert (
            "The machine was busy with something else: half of the 3 pairs of blocks have ratios from 2.50 to 3.50."
            in text
        )
        assert (
            "There is no verdict on the speed; the ratio was about 3. The device does not take both processes" in text
        )
        assert "as fast" not in text


def test_the_ratio_is_that_of_blocks():
    def run(seconds: float) -> Run:
        blocks = [{"seconds": 3 * seconds, "cpu_seconds": seconds, "steps": 3, "pair": pair} for pair in (0, 1)]
        return Run(steps=[{"loss": 0.5}] * 6, blocks=blocks, memory={"before": 1, "peak": MEBIBYTE}, device="cuda")

    comparison = {"recipe": {"name": "x"}, **summarize_turns(Turns({"stock": run(4.0), "fast": run(1.0)}, False))}
    head, step, cpu, *_ = comparison_table(comparison).rows
    assert head == ("", "stock", "fast", "fast / stock")
    assert step == ("median step", "4.000 s", "1.000 s", "4.00x as fast") and cpu[-1] == "4x"
    assert headline(comparison).endswith(": 4.00x as fast per step, 100% of the peak memory")
