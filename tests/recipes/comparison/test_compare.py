"""Stock against fast: both really run, and what goes wrong in one of them is said or shown."""

import base64
import importlib
import importlib.util
import io
import json
import math
import re
import resource
import subprocess
import sys
import time
from html.parser import HTMLParser
from importlib.metadata import version
from pathlib import Path
from xml.etree import ElementTree

import pytest
from paths import RECIPES

pytest.importorskip("typer")
pytest.importorskip("matplotlib")
pytest.importorskip("pylate")

import torch
from PIL import Image
from rich.console import Console
from tiny_recipe import few_steps, hub_dataset, kd_subsets, tiny, write
from typer.testing import CliRunner

from pylate_fastmaxsim.cli import commands
from pylate_fastmaxsim.cli.commands import app
from pylate_fastmaxsim.recipes.comparison import compare as comparing
from pylate_fastmaxsim.recipes.comparison import figures
from pylate_fastmaxsim.recipes.comparison.compare import (
    Progress,
    _last_bar,
    contrast,
    read_steps,
    summarize,
)
from pylate_fastmaxsim.recipes.comparison.figures import draw_comparison
from pylate_fastmaxsim.recipes.comparison.html import sweep_sentence, write_html
from pylate_fastmaxsim.recipes.comparison.phases import PHASES
from pylate_fastmaxsim.recipes.comparison.report import LABELS, comparison_table, sweep_rows, sweep_table
from pylate_fastmaxsim.recipes.files.json import without_nan, write_json
from pylate_fastmaxsim.recipes.load import load_recipe
from pylate_fastmaxsim.recipes.memory import PeakMemory, is_out_of_memory, peak_resident

MEBIBYTE = 2**20
WALL = {"wall_seconds": {"stock": 2.0, "fast": 1.0, "whole": 4.0}}  # what compare adds to a summary


def compare(recipe: Path, *overrides: str):
    arguments = [argument for override in overrides for argument in ("--set", override)]
    return CliRunner().invoke(app, ["compare", str(recipe), *arguments])


def shown(comparison: dict) -> str:
    console = Console(width=200, file=io.StringIO())
    console.print(comparison_table(comparison))
    return console.file.getvalue()


class Page(HTMLParser):
    """A report as a browser without a network sees it; anything that it would have to fetch fails."""

    def __init__(self, html: str):
        super().__init__()
        self.titles, self.images, self.text, self._tag = [], [], "", ""
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        self._tag = tag
        attributes = dict(attributes)
        assert tag not in ("script", "link", "iframe", "object") and "href" not in attributes
        if "src" in attributes:
            kind, _, data = attributes["src"].partition(";base64,")
            assert kind == "data:image/svg+xml" and attributes["alt"]
            self.images.append(ElementTree.fromstring(base64.b64decode(data)))

    def handle_data(self, data):
        assert "url(" not in data and "@import" not in data
        self.text += data
        if self._tag == "h2" and data.strip():
            self.titles.append(data)


def test_a_comparison_runs_both_and_writes_numbers_and_a_picture(tmp_path):
    recipe = tiny(tmp_path, training={"max_steps": 8, "learning_rate": 1e-3})
    recipe["model"]["build"]["dropout"] = 0.0
    done = compare(write(tmp_path, recipe), "model.document_length=64", "fast.stock_masking=true")
    assert done.exit_code == 0, done.output
    comparison = json.loads((tmp_path / "out" / "compare.json").read_text())
    stock, fast = comparison["runs"]["stock"], comparison["runs"]["fast"]
    for run in (stock, fast):
        assert run["status"] == "finished" and run["steps"] == len(run["losses"]) == 8
        assert run["step_seconds"] > 0 and run["documents_per_second"] > 0
        assert run["memory"]["peak"] >= run["memory"]["before"] > 50 * MEBIBYTE
        assert 0 < run["ndcg@10"] <= 1
        assert tuple(run["phases"]) == PHASES and all(seconds > 0 for seconds in run["phases"].values())
    for name in ("stock", "fast"):
        # Behind the bars of the evaluation, so that the terminal does not show those while phases are measured.
        before, phases, _ = (
            (tmp_path / "out" / "compare" / f"{name}.log").read_text().rpartition("Measuring phases: 100%")
        )
        assert phases and "Measuring phases:   0%|          | 0/7 [" in before
    # What is measured is what trains: measuring does not keep the head from being fused, for one.
    assert fast["warnings"] == []
    # Stock and fast begin with the same model, which is evaluated once.
    assert 0 < fast["untrained"]["ndcg@10"] <= 1 and "untrained" not in stock
    # Rows of 4 to 21 words in 64 places: most of what stock encodes is padding, little of what fast does.
    assert stock["padding"] > 0.5 > fast["padding"] >= 0
    assert comparison["summary"]["largest_loss_difference"] < 1e-4
    assert abs(comparison["summary"]["ndcg@10_difference"]) < 1e-6
    assert comparison["summary"]["speedup"] == stock["step_seconds"] / fast["step_seconds"]
    wall, taken = comparison["summary"]["wall_seconds"], fast["untrained_seconds"]
    # What only one of them did counts for neither, but for the whole.
    assert wall["stock"] + wall["fast"] + taken < wall["whole"] and "untrained_seconds" not in stock
    assert wall.keys() == {"stock", "fast", "whole"} and 0 < wall["stock"] + wall["fast"] < wall["whole"]
    assert f"The whole comparison took {wall['whole']:.0f} s." in " ".join(done.stdout.split())
    assert comparison["recipe"]["name"] == "tiny"
    with Image.open(tmp_path / "out" / "compare.png") as picture:
        assert picture.width > 1000
    assert "median step" in done.stdout and "compare.png" in done.stdout and "compare.html" in done.stdout
    assert "allocator" not in done.stdout  # of a GPU
    page = Page((tmp_path / "out" / "compare.html").read_text())
    assert page.titles == [
        "Step time and memory",
        "Loss",
        "Where a step's time goes",
        "What was padded away",
        "Retrieval quality before and after",
        "Versions",
        "Recipe",
    ]
    assert len(page.images) == 4
    assert f"{wall['stock']:.1f} s" in page.text and f"{wall['fast']:.1f} s" in page.text
    assert f"The whole comparison took {wall['whole']:.0f} s." in page.text
    assert f"{fast['untrained']['ndcg@10']:.4f}" in page.text and f"{fast['ndcg@10']:.4f}" in page.text
    assert version("transformers") in page.text and "document_length: 64" in page.text
    assert not list((tmp_path / "out").glob("checkpoint-*"))


def test_the_time_that_only_one_run_took_counts_for_none(tmp_path, monkeypatch):
    result = {"status": "out of memory", "untrained_seconds": 1000}  # more than either takes here
    monkeypatch.setattr(comparing, "_run", lambda *said: (result if "--untrained" in said else {"status": "no"}, []))
    wall = comparing.compare(load_recipe(write(tmp_path, tiny(tmp_path))))["summary"]["wall_seconds"]
    assert -1000 < wall["fast"] < -900 and 0 < wall["stock"] < 100 and 0 < wall["whole"] < 100


def test_a_distillation_recipe_is_compared(encoder, tmp_path):
    data = hub_dataset(tmp_path / "data", **kd_subsets())
    overrides = few_steps(tmp_path / "out", f"model.name_or_path={encoder('modernbert')}", f"data.name={data}")
    overrides += ["data.n_ways=4", "evaluation.rows=8", "fast.stock_masking=true"]
    done = compare(RECIPES / "colbert_kd.yaml", *overrides)
    assert done.exit_code == 0, done.output
    comparison = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert comparison["summary"]["largest_loss_difference"] < 1e-4
    stock, fast = comparison["runs"]["stock"], comparison["runs"]["fast"]
    # 8 queries of 12 tokens a step, each with 4 documents.
    assert stock["tokens_per_step"]["queries"] == fast["tokens_per_step"]["queries"] == 8 * 12
    assert stock["tokens_per_step"]["documents"] == fast["tokens_per_step"]["documents"] <= 8 * 4 * 32
    assert stock["tokens_per_step"]["padding"] > fast["tokens_per_step"]["padding"] >= 0
    assert all(set(run["phases"]) == set(PHASES) for run in (stock, fast))
    page = Page((tmp_path / "out" / "compare.html").read_text())
    assert len(page.images) == 4
    assert fast["kl_divergence"] == pytest.approx(stock["kl_divergence"], rel=1e-3)
    for place in (page.text, done.stdout):
        assert "KL divergence" in place
        assert all(f"{run['kl_divergence']:.4f}" in place for run in (stock, fast, fast["untrained"]))


def test_running_out_of_memory_is_a_result_and_ends_a_sweep(tmp_path):
    # The stock similarity tensor, 640 x 640 x 16 x 200 fp32 values, is 4.9 GiB; a process has about half of it left.
    limited = (
        "import resource, sys\n"
        "resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv.pop(1)),) * 2)\n"
        "from pylate_fastmaxsim.cli import main\n"
        "from pylate_fastmaxsim.recipes import compare\n"
        "compare.SWEEP_STEPS = 2\n"
        "main()\n"
    )
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    recipe = tiny(tmp_path, data={"files": None, "source": "docstrings", "packages": ["numpy"], "max_rows": 650})
    recipe["model"] |= {"query_length": 16, "document_length": 200}
    recipe["training"] |= {"per_device_train_batch_size": 640, "max_steps": 1}
    recipe["evaluation"]["rows"] = 0
    command = [sys.executable, "-c", limited, str(used + 2560 * MEBIBYTE), "compare", str(write(tmp_path, recipe))]
    command += ["--sweep", "batch_size=650,640"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    comparison = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert [run["status"] for run in comparison["runs"].values()] == ["out of memory", "finished"]
    stock, fast = comparison["sweep"]["stock"], comparison["sweep"]["fast"]
    assert [(point["batch_size"], point["status"]) for point in stock] == [(640, "out of memory"), (650, "not run")]
    assert [(point["batch_size"], point["status"]) for point in fast] == [(640, "finished"), (650, "finished")]
    assert all(point["step_seconds"] > 0 and point["memory"]["peak"] > 50 * MEBIBYTE for point in fast)
    assert "Stock runs out of memory at 640, the smallest batch tried. Fast takes every batch tried, up to 650." in (
        done.stdout
    )
    assert (tmp_path / "out" / "compare.png").exists()
    page = Page((tmp_path / "out" / "compare.html").read_text())
    assert "runs out of memory at 640" in page.text and "Against batch size" in page.titles


@pytest.mark.parametrize(
    "sweep", ["batch_size=8,x", "batch_size=", "batch_size=0", "seed=1", "8,16", "batch_size=8,1000"]
)
def test_a_sweep_that_cannot_be_is_one_sentence_before_anything_runs(sweep, tmp_path):
    done = CliRunner().invoke(app, ["compare", str(write(tmp_path, tiny(tmp_path))), "--sweep", sweep])
    assert done.exit_code == 2 and done.stderr.count("\n") == 1
    said = (
        "--sweep: batch_size must be at most 60, as many rows as the data has, got 1000."
        if "1000" in sweep
        else f"--sweep {sweep}: write it as batch_size=64,256,1024"
    )
    assert said in done.stderr
    assert not (tmp_path / "out" / "compare").exists()


@pytest.mark.cuda
def test_on_a_gpu_nothing_is_padded_and_stock_runs_out_of_memory_first(tmp_path):
    if any(importlib.util.find_spec(peer) for peer in ("late_interaction_kernels", "flash_maxsim")):
        pytest.skip("PyLate scores through an installed fused-kernel package, which needs no similarity tensor")
    # A batch whose similarity tensor, batch x batch x 32 x 300 fp32 values, is larger than the GPU.
    batch = math.ceil(math.sqrt(1.1 * torch.cuda.get_device_properties(0).total_memory / (32 * 300 * 4)))
    packages = ["numpy", "scipy", "torch", "transformers"]
    recipe = tiny(tmp_path, data={"files": None, "source": "docstrings", "packages": packages, "max_rows": batch + 400})
    recipe["model"] |= {"query_length": 32, "document_length": 300}
    recipe["training"] |= {"use_cpu": False, "max_steps": 3}
    small = compare(write(tmp_path, recipe), "training.per_device_train_batch_size=64")
    assert small.exit_code == 0, small.output
    runs = json.loads((tmp_path / "out" / "compare.json").read_text())["runs"]
    assert runs["fast"]["padding"] == 0 < runs["stock"]["padding"]
    assert runs["fast"]["memory"]["peak"] < runs["stock"]["memory"]["peak"]
    large = compare(write(tmp_path, recipe), f"training.per_device_train_batch_size={batch}")
    assert large.exit_code == 0, large.output
    runs = json.loads((tmp_path / "out" / "compare.json").read_text())["runs"]
    assert (runs["stock"]["status"], runs["fast"]["status"]) == ("out of memory", "finished")


def test_a_run_that_fails_otherwise_shows_its_last_line_of_error(tmp_path, monkeypatch):
    # The children cannot import what they need; the parent already has.
    (tmp_path / "broken" / "accelerate").mkdir(parents=True)
    (tmp_path / "broken" / "accelerate" / "__init__.py").write_text("raise OSError('no such device')")
    file = write(tmp_path, tiny(tmp_path))
    monkeypatch.syspath_prepend(tmp_path / "broken")
    done = compare(file)
    assert done.exit_code == 1
    assert done.stderr.startswith("fastmaxsim: The stock run failed: OSError: no such device (see ")
    assert not (tmp_path / "out" / "compare.json").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for bf16 on a GPU that is not there")
def test_a_recipe_that_does_not_fit_this_machine_is_one_sentence(tmp_path):
    done = compare(write(tmp_path, tiny(tmp_path)), "training.precision=bf16", "training.use_cpu=false")
    assert done.exit_code == 1 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("fastmaxsim: The stock run failed: training: Your setup doesn't support bf16")


def test_a_comparison_under_a_distributed_launcher_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    done = compare(write(tmp_path, tiny(tmp_path)))
    assert done.exit_code == 2 and "without a distributed launcher" in done.stderr


def steps(seconds: list[float], encoded: int) -> list[dict]:
    return [
        {"loss": 1 / (place + 1), "seconds": s, "documents": 4, "live": 30, "query_tokens": 20, "encoded": encoded}
        for place, s in enumerate(seconds)
    ]


def test_times_are_taken_after_the_warm_up_and_padding_over_all_steps():
    run = summarize({"status": "finished"}, steps([9.0] * 5 + [1.0, 2.0, 3.0] + [2.0] * 8, encoded=80))
    assert run["step_seconds"] == 2.0
    assert run["documents_per_second"] == 4 * 11 / 22
    assert run["live_tokens_per_second"] == 30 * 11 / 22
    assert run["padding"] == 0.5
    # In a short run the warm-up is a third.
    assert summarize({"status": "finished"}, steps([9.0, 1.0, 1.0], encoded=80))["step_seconds"] == 1.0
    assert "step_seconds" not in summarize({"status": "out of memory"}, [])


def test_a_comparison_with_a_run_out_of_memory_is_drawn(tmp_path):
    on_gpu = {"before": 100, "peak": 200, "held": 77 * MEBIBYTE}
    result = {"status": "finished", "memory": on_gpu, "ndcg@10": 0.5}
    environment = {"device": "some GPU", "device_memory": 80 * 2**30}
    fast = summarize({**result, "environment": environment}, steps([1.0] * 6, encoded=50))
    for stock in (
        summarize({"status": "out of memory"}, steps([2.0] * 3, encoded=80)),
        summarize({"status": "out of memory"}, []),
        summarize({**result, "ndcg@10": 0.4}, steps([2.0] * 6, encoded=80)),
    ):
        runs = {"stock": stock, "fast": fast}
        comparison = {"recipe": {"name": "x"}, "runs": runs, "summary": contrast(stock, fast) | WALL}
        draw_comparison(comparison, tmp_path / "compare.png")
        write_html(comparison | {"recipe": {"name": "<script>x"}}, tmp_path / "compare.html")
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


@pytest.mark.parametrize(("held", "said"), [(125, False), (126, True)])
def test_an_allocator_that_holds_much_more_than_is_used_is_spoken_of(held, said):
    runs = {
        mode: summarize({"status": "finished", "memory": memory, "ndcg@10": 0.5}, steps([1.0] * 6, encoded=50))
        for mode, memory in (
            ("stock", {"before": 1, "peak": 100}),
            ("fast", {"before": 1, "peak": 100, "held": held}),
        )
    }
    comparison = {"recipe": {"name": "x"}, "runs": runs, "summary": contrast(*runs.values()) | WALL}
    assert ("expandable_segments:True" in shown(comparison)) == said


def test_what_was_measured_is_shown_before_it_is_drawn_whatever_its_name(tmp_path, monkeypatch):
    result = {"status": "finished", "memory": {"before": 100, "peak": 200}, "ndcg@10": None}
    run = summarize({**result}, steps([1.0] * 4, encoded=50))
    runs = {"stock": run, "fast": run}
    comparison = {"recipe": {"name": "$\\nosuch$ run"}, "runs": runs, "summary": contrast(run, run) | WALL}
    draw_comparison(comparison, tmp_path / "compare.png")
    monkeypatch.setattr(comparing, "compare", lambda *arguments: comparison)
    monkeypatch.setattr(figures, "draw_comparison", lambda *arguments: 1 / 0)
    done = compare(write(tmp_path, tiny(tmp_path)))
    assert isinstance(done.exception, ZeroDivisionError) and "median step" in done.stdout


def test_tables_need_no_matplotlib_and_figures_leave_its_backend_alone(tmp_path):
    program = """
import sys
from pylate_fastmaxsim.recipes import report
assert "matplotlib" not in sys.modules
from pylate_fastmaxsim.recipes import figures
assert "matplotlib.pyplot" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("lost", [math.nan, math.inf])
@pytest.mark.parametrize("modes", [("fast",), ("stock",), ("stock", "fast")])
def test_a_loss_that_is_not_a_number_is_seen(modes, lost, tmp_path):
    result = {"status": "finished", "memory": {"before": 100, "peak": 200}, "ndcg@10": None}
    runs = {mode: summarize({**result}, steps([1.0] * 4, encoded=50)) for mode in ("stock", "fast")}
    for mode in modes:
        # Between finite ones, where max() returns the larger of those.
        runs[mode]["losses"] = [1.5, lost, 0.1, lost]
    summary = contrast(runs["stock"], runs["fast"])
    assert math.isnan(summary["largest_loss_difference"]) and summary["loss_difference_nan_from"] == 2
    comparison = without_nan({"recipe": {"name": "x"}, "runs": runs, "summary": summary | WALL})
    write_json(tmp_path / "compare.json", comparison)

    def refused(constant):
        raise ValueError(f"{constant} is not JSON")

    comparison = json.loads((tmp_path / "compare.json").read_text(), parse_constant=refused)
    assert comparison["runs"][modes[0]]["losses"] == [1.5, None, 0.1, None]
    assert comparison["summary"]["largest_loss_difference"] is None
    draw_comparison(comparison, tmp_path / "compare.png")
    write_html(comparison, tmp_path / "compare.html")
    page = " ".join(Page((tmp_path / "compare.html").read_text()).text.split())
    for text in (page, " ".join(shown(comparison).split())):
        assert "Largest difference of the loss curves over 4 steps: NaN, first at step 2." in text
        final = text.partition("last loss")[2][:60]
        assert final.count("NaN") == len(modes) and final.count("0.2500") == 2 - len(modes)


def test_the_readme_says_where_losses_are_not_numbers(monkeypatch):
    from benchmarks import update_readme

    result = update_readme.results("quickstart")
    assert "the loss curves differ by at most" in update_readme.quickstart_table()
    result["runs"]["fast"]["losses"][-1] = None
    result["summary"] |= {"largest_loss_difference": None, "loss_difference_nan_from": 7}
    monkeypatch.setattr(update_readme, "results", {"quickstart": result}.get)
    table = update_readme.quickstart_table()
    assert table.endswith("the loss curves differ by NaN, first at step 7.") and "| NaN |" in table


def test_each_run_has_a_bar_with_its_rate_and_the_time_left(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "160")
    with commands._progress() as on_progress:
        on_progress(Progress("stock run", 0, None))
        for done in (2, 4):
            time.sleep(0.05)
            on_progress(Progress("stock run", done, 8))
        on_progress(Progress("fast run", 8, 8, "Searching: 45% 9/20 [00:05<00:06]"))
    shown = re.sub("\x1b[^mKAl]*[mKAl]", "", capsys.readouterr().err)
    last = {line.split(" run")[0]: line for line in shown.splitlines() if " run" in line}
    assert re.search(r"4/8 [\d.]+ steps/s \d:\d\d:\d\d", last["stock"])
    assert "8/8" in last["fast"] and "Searching: 45% 9/20 [00:05<00:06]" in last["fast"]


def test_the_last_bar_of_a_log_is_found(tmp_path):
    log = tmp_path / "log"
    log.write_text("said\nSearching:  10%|█  | 2/20 [00:01<00:09]\rSearching:  45%|███  | 9/20 [00:05<00:06]")
    assert _last_bar(log) == "Searching:  45% 9/20 [00:05<00:06]"
    log.write_text("said\n")
    assert _last_bar(log) == ""


def test_a_sweep_says_how_far_each_path_went():
    def point(batch_size, status):
        return {
            "batch_size": batch_size,
            "status": status,
            "step_seconds": 0.25,
            "memory": {"before": 1, "peak": 2**30},
        }

    sizes = (64, 256, 1024)
    # Without a step there is nothing but the status.
    empty = {mode: [point(64, "finished"), {"batch_size": 4096, "status": "no batch of this size"}] for mode in LABELS}
    assert sweep_sentence(empty) == (
        "Stock takes every batch tried, up to 64. Fast takes every batch tried, up to 64. No batch of 4,096 can be made "
        "of the rows."
    )
    Console(file=io.StringIO()).print(sweep_table(empty))
    assert "out of memory" not in figures.svg(figures.sweep(empty), 8, 4)
    points = {
        "stock": list(map(point, sizes, ("finished", "out of memory", "not run"))),
        "fast": list(map(point, sizes, ("finished",) * 3)),
    }
    assert sweep_sentence(points) == (
        "Stock takes a batch of 64 and runs out of memory at 256. Fast takes every batch tried, up to 1,024."
    )
    console = Console(width=200, file=io.StringIO())
    console.print(sweep_table(points))
    table = console.file.getvalue()
    rows = sweep_rows(points)
    assert rows[0] == (
        "batch size",
        "stock, median step",
        "stock, peak memory",
        "fast, median step",
        "fast, peak memory",
    )
    assert rows[2:] == [
        ("256", "out of memory", "-", "0.250 s", "1,024 MiB"),
        ("1,024", "not run", "-", "0.250 s", "1,024 MiB"),
    ]
    assert all(text in table for row in rows for text in row)
    assert table.count("0.250 s") == 4 and "1,024 MiB" in table and "out of memory" in table and "not run" in table
    drawn = figures.svg(figures.sweep(points, capacity=2**31), 8, 4)
    assert drawn.count("<!-- out of memory -->") == 2


def test_a_line_still_being_written_is_not_a_step(tmp_path):
    file = tmp_path / "steps.jsonl"
    assert read_steps(file) == []
    file.write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert read_steps(file) == [{"step": 1}, {"step": 2}]


def test_what_counts_as_out_of_memory():
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory."))
    assert is_out_of_memory(MemoryError())
    with pytest.raises(RuntimeError) as error:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(error.value)
    # Where another one than PyTorch's allocator asked for memory of the GPU, in PyTorch's words and in Triton's.
    assert is_out_of_memory(RuntimeError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in ..."))
    assert is_out_of_memory(RuntimeError("Triton Error [CUDA]: out of memory"))
    assert not is_out_of_memory(RuntimeError("shape mismatch"))


def test_peak_memory_counts_from_where_it_starts():
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("the kernel does not let a process reset its peak memory")
    torch.ones(64 * MEBIBYTE, dtype=torch.uint8)  # earlier, so it does not count
    memory = PeakMemory(torch.device("cpu"))
    assert memory.peak() - memory.before < 32 * MEBIBYTE
    torch.ones(128 * MEBIBYTE, dtype=torch.uint8)
    assert 120 * MEBIBYTE < memory.peak() - memory.before < 200 * MEBIBYTE
    assert peak_resident() == memory.peak()


def test_modules_in_the_working_directory_are_not_taken_for_libraries(tmp_path, monkeypatch):
    file = write(tmp_path, tiny(tmp_path, training={"max_steps": 2}, evaluation={"rows": 0}))
    (tmp_path / "datasets").mkdir()
    (tmp_path / "datasets" / "__init__.py").write_text("")
    (tmp_path / "tokenizers.py").write_text("")
    monkeypatch.chdir(tmp_path)
    done = compare(file)
    assert done.exit_code == 0, done.output
