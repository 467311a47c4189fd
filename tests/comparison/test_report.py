import io
import json
import math
import re
import sys
from functools import partial

import pytest
from rich.console import Console

from pylate_fastmaxsim.comparison import report
from pylate_fastmaxsim.comparison.figures import draw_sweep
from pylate_fastmaxsim.comparison.report import caption, comparison_table, headline, sweep_rows
from pylate_fastmaxsim.comparison.turns import Run, Turns
from pylate_fastmaxsim.comparison.verdict import MODES, contrast, summarize_steps, summarize_turns, verdict
from pylate_fastmaxsim.files.replace import write_json
from pylate_fastmaxsim.reporting.figures import svg
from pylate_fastmaxsim.reporting.numbers import without_nan
from tests.support.comparisons import Page, run_of_blocks, steps

MEBIBYTE = 2**20
WALL = {"wall_seconds": {"stock": 2.0, "fast": 1.0, "whole": 4.0}}  # what compare adds to a summary


def finished(seconds: float = 1.0, ndcg: float | None = 0.5, encoded: int = 50, **more) -> dict:
    result = {"status": "finished", "memory": {"before": 100, "peak": 200}, "ndcg@10": ndcg}
    return result | more | summarize_steps(steps([seconds] * 6, encoded=encoded))


def compared(stock: dict, fast: dict, name: str = "x") -> dict:
    runs = {"stock": stock, "fast": fast}
    return {"recipe": {"name": name}, "runs": runs, "summary": contrast(stock, fast) | WALL}


def shown(comparison: dict) -> str:
    console = Console(width=200, file=io.StringIO())
    console.print(comparison_table(comparison))
    return " ".join(console.file.getvalue().split())


def page_of(comparison: dict, folder) -> Page:
    report.write_pictures(comparison, folder / "compare.json")
    return Page((folder / "compare.html").read_text())


def test_a_comparison_with_a_run_out_of_memory_is_drawn(tmp_path):
    held = {"before": 100, "peak": 200, "held": 77 * MEBIBYTE}
    environment = {"device": "some GPU", "device_memory": 80 * 2**30}
    fast = finished(memory=held, environment=environment, warnings=["said twice"])
    gone = {"status": "out of memory"}
    whole = finished(2.0, 0.4, 80, memory=held, warnings=["said twice", "no metrics"])
    for stock in (gone | summarize_steps(steps([2.0] * 3, encoded=80)), gone | summarize_steps([]), whole):
        comparison = compared(stock, fast)
        page, table = page_of(compared(stock, fast, "<script>$\\nosuch$ x"), tmp_path), shown(comparison)
        assert "<script>$\\nosuch$ x" in page.text and "80.0 GiB" in page.text
        for text in (page.text, table):
            assert "held by PyTorch's allocator" in text and "77 MiB" in text
        if stock["status"] == "finished":
            assert comparison["summary"]["speedup"] == 2.0 and comparison["summary"]["peak_memory"] == 1.0
            assert "expandable_segments:True" in table
            assert "2.00x as fast" in table and "+0.1000" in table and "x on some GPU" in table
            assert "both runs: said twice" in page.text and "stock run: no metrics" in page.text
        else:
            assert comparison["summary"]["speedup"] is None and "out of memory" in table
    assert contrast(stock, stock)["largest_loss_difference"] == 0.0
    plain = shown(compared(finished(), finished()))
    assert "unknown device" in plain and "expandable_segments" not in plain


@pytest.mark.parametrize(("modes", "lost"), [(("fast",), math.nan), (("stock", "fast"), math.inf)])
def test_a_loss_that_is_not_a_number_is_seen(modes, lost, tmp_path):
    runs = {mode: finished(ndcg=None) for mode in MODES}
    for mode in modes:
        # Between finite ones, where max() returns the larger of those.
        runs[mode]["losses"] = [1.5, lost, 0.1, lost, 0.3, lost]
    comparison = compared(**runs)
    assert math.isnan(comparison["summary"]["largest_loss_difference"])
    assert comparison["summary"]["loss_difference_nan_from"] == 2
    write_json(tmp_path / "compare.json", without_nan(comparison))
    comparison = json.loads((tmp_path / "compare.json").read_text(), parse_constant=pytest.fail)
    assert comparison["runs"][modes[0]]["losses"] == [1.5, None, 0.1, None, 0.3, None]
    assert comparison["summary"]["largest_loss_difference"] is None
    for text in (" ".join(page_of(comparison, tmp_path).text.split()), shown(comparison)):
        assert "Largest difference of the loss curves over 6 steps: NaN, first at step 2." in text
        final = text.partition("last loss")[2][:60]
        assert final.count("NaN") == len(modes) and final.count("0.1667") == 2 - len(modes)


# Tokens of documents that stock encodes, of a step; what fast did, what was warned of, the device; and what the table says.
SLOWER = [
    (32, ["ColBERT: Documents are packed."], [], "A GPU", "stock encodes 6% are padding"),
    (80, ["ColBERT: Documents are packed."], [], "A GPU", "a step has 50 tokens, for which the GPU waits"),
    (80, [], ["A loss of your own encodes with padding."], "CPU", "fast encodes with padding as well"),
]


@pytest.mark.parametrize(("live", "decided", "warned", "device", "why"), SLOWER)
def test_the_table_says_how_texts_were_encoded(live, decided, warned, device, why, capsys, tmp_path):
    stock = finished(1.0, encoded=live + 20)
    more = {"decisions": decided, "warnings": [*warned, "more"], "environment": {"device": device}}
    table = shown(slower := compared(stock, finished(2.0, **more)))
    assert f"fast run: {[*decided, *warned][0]} fast is slower here: " in table and why in table
    assert "slower" not in shown(compared(stock, finished(0.5, **more)))
    # Not said twice.
    report.publish(slower, tmp_path / "compare.json")
    assert capsys.readouterr().err == "fast run: more\n"


def test_a_sweep_says_how_far_each_path_went():
    def point(batch_size, status):
        memory = {"before": 1, "peak": 2**30}
        return {"batch_size": batch_size, "status": status, "step_seconds": 0.25, "memory": memory}

    sizes = (64, 256, 1024)
    # Without a step there is nothing but the status.
    empty = {mode: [point(64, "finished"), {"batch_size": 4096, "status": "no batch of this size"}] for mode in MODES}
    assert sweep_rows(empty)[2] == ("4,096", *["no batch of this size", "-"] * 2)
    assert "out of memory" not in svg(partial(draw_sweep, empty, None), 8, 4)
    points = {"stock": list(map(point, sizes, ("finished", "out of memory", "not run")))}
    points["fast"] = list(map(point, sizes, ("finished",) * 3))
    assert sweep_rows(points)[2:] == [
        ("256", "out of memory", "-", "0.250 s", "1,024 MiB"),
        ("1,024", "not run", "-", "0.250 s", "1,024 MiB"),
    ]
    assert svg(partial(draw_sweep, points, 2**31), 8, 4).count("<!-- out of memory -->") == 2


def test_a_script_has_fewer_rows_than_a_recipe(tmp_path):
    measured = [{"loss": 0.5, "seconds": seconds} for seconds in (9.0, 1.0, 1.0)]
    run = {"status": "finished", "memory": {"before": 100, "peak": 200 * MEBIBYTE}} | summarize_steps(measured)
    comparison = compared(run, run, "train.py")
    comparison["summary"] = contrast(run, run)
    titles = [row[0] for row in comparison_table(comparison).rows]
    assert titles == ["", "median step", "peak memory", "  before training", "last loss"]
    page = page_of(comparison, tmp_path)
    assert "wall clock" not in page.text and page.titles == ["Loss, step time and memory", "Versions", "Command"]


def test_the_ratio_is_that_of_blocks_and_of_a_busy_machine_there_is_no_verdict(tmp_path):
    def judged(stock: list[float], fast: list[float], device: str, restarted: bool) -> dict:
        runs = {"stock": run_of_blocks(*stock, device=device), "fast": run_of_blocks(*fast, device=device)}
        return {"recipe": {"name": "x"}, **summarize_turns(Turns(runs, restarted))}

    calm = judged([12.0, 12.0], [3.0, 3.0], "cuda", False)
    head, step, cpu, *_ = comparison_table(calm).rows
    assert head == ("", "stock", "fast", "fast / stock")
    assert step == ("median step", "4.000 s", "1.000 s", "4.00x as fast") and cpu[-1] == "4x"
    assert headline(calm).endswith(": 4.00x as fast per step, 100% of the peak memory")
    assert calm["summary"]["speedup"] == calm["summary"]["turns"]["ratio"] == 4.0
    assert calm["summary"]["wall_seconds"] == {"stock": 9.0, "fast": 9.0}
    # Of 11 steps, 5 are warm-up.
    assert calm["runs"]["fast"]["step_seconds"] == 1.0 and calm["runs"]["fast"]["cpu_step_seconds"] == 2.0
    gone = summarize_turns(Turns({"stock": Run("out of memory"), "fast": run_of_blocks(3.0)}, restarted=False))
    assert gone["summary"]["speedup"] is gone["summary"]["turns"] is None
    warm_up = judged([], [], "cpu", False)
    assert warm_up["summary"]["speedup"] is None
    assert headline(warm_up).endswith("too few steps for a verdict on the speed")
    busy = judged([2, 3, 4], [1, 1, 1], "cpu", True)
    assert ": no verdict on the speed, the machine was busy, 100% of the peak memory" in headline(busy)
    for text in (shown(busy), page_of(busy, tmp_path).text):
        assert "busy with something else: half of the 3 pairs of blocks have ratios from 2.50 to 3.50." in text
        said = "There is no verdict on the speed; the ratio was about 3. The device does not take both processes"
        assert said in text and "as fast" not in text


def test_without_rich_and_matplotlib_the_table_is_text(monkeypatch, tmp_path, capsys):
    for name in ("rich.console", "rich.table", "matplotlib", "matplotlib.figure", "matplotlib.ticker"):
        monkeypatch.setitem(sys.modules, name, None)
    run = finished(memory={"before": MEBIBYTE, "peak": 2 * MEBIBYTE}, losses=[])
    comparison = compared(run, run, "train.py")
    report.publish(comparison, tmp_path / "compare.json")
    said = capsys.readouterr()
    assert "train.py on unknown device\n" in said.out
    assert re.search(r"\npeak memory +2 MiB +2 MiB +100%\n", said.out)
    assert said.err == "There is no PNG and no HTML: matplotlib is missing.\n"
    assert json.loads((tmp_path / "compare.json").read_text()) == comparison


def test_the_ratio_is_of_blocks_beside_each_other():
    judged = verdict(run_of_blocks(2.0, 2.0, 4.1, 4.0), run_of_blocks(1.0, 1.0, 2.0, 2.0))
    assert judged["ratio"] == 2.0 and judged["pairs"] == 4 and judged["cpu_ratio"] == pytest.approx(2.0)
    assert judged["quartiles"] == pytest.approx([2.0, 2.0125]) and not judged["busy"] and judged["why_busy"] is None
    # One that was disturbed alone does not turn it.
    assert verdict(run_of_blocks(2.0, 2.0, 9.0, 2.0, 2.0), run_of_blocks(*[1.0] * 5))["ratio"] == 2.0
    # Blocks that have no partner, or one of other steps, do not count.
    assert verdict(run_of_blocks(2.0, 2.0), run_of_blocks(1.0))["pairs"] == 1
    assert verdict(run_of_blocks(2.0), run_of_blocks(1.0, steps=2)) is verdict(run_of_blocks(), run_of_blocks()) is None


def test_a_machine_is_busy_where_ratios_are_apart_or_cpu_seconds_say_another():
    # A long last block, which stood beside none, turns the medians alone.
    for step, is_left_out in ((1 / 3, False), (3.0, True)):
        fast = run_of_blocks(*[1.0] * 4)
        fast.steps += [{"loss": 1.0}] * 30
        fast.blocks += [{"seconds": 30 * step, "cpu_seconds": 1.0, "steps": 30, "pair": None}]
        runs = {"stock": run_of_blocks(2.0, 2.0, 2.4, 2.6), "fast": fast}
        compared = summarize_turns(Turns(runs, restarted=False))
        assert is_left_out != all("step_seconds" in each for each in compared["runs"].values())
        said = caption({"recipe": {"name": "x"}, **compared})
        assert is_left_out == ("Median steps, which contradict it, are left out." in said)
    judged = verdict(run_of_blocks(2.0, 2.0, 2.4, 2.6), run_of_blocks(*[1.0] * 4))
    assert judged["busy"] and "half of the 4 pairs of blocks have ratios from 2.00 to 2.45" in judged["why_busy"]
    assert not verdict(run_of_blocks(2.0, 2.0, 2.2, 2.3), run_of_blocks(*[1.0] * 4))["busy"]
    stock, fast = run_of_blocks(1.0, 1.0, cpu=2.0), run_of_blocks(1.0, 1.0, cpu=1.0)
    judged = verdict(stock, fast)
    assert judged["busy"] and "the ratio of CPU seconds is 2.0, that of wall seconds 1.0" in judged["why_busy"]
    assert not verdict(stock, run_of_blocks(1.0, 1.0, cpu=1.7))["busy"]
    # The host waits for a GPU, so that its seconds say nothing about steps.
    assert not verdict(run_of_blocks(1.0, device="cuda"), run_of_blocks(1.0, cpu=1.0, device="cuda"))["busy"]
    # Too short for the clock of the system.
    assert verdict(run_of_blocks(1.0, cpu=0.0), run_of_blocks(1.0, cpu=0.0))["cpu_ratio"] is None


def test_times_are_taken_after_the_warm_up_and_padding_over_all_steps():
    taken = summarize_steps(steps([9.0] * 5 + [1.0, 2.0, 3.0] + [2.0] * 8, encoded=80))
    assert (taken["step_seconds"], taken["padding"]) == (2.0, 0.5)
    assert (taken["documents_per_second"], taken["live_tokens_per_second"]) == (4 * 11 / 22, 30 * 11 / 22)
    # In a short run the warm-up is a third.
    assert summarize_steps(steps([9.0, 1.0, 1.0], encoded=80))["step_seconds"] == 1.0
    assert "step_seconds" not in summarize_steps([])
