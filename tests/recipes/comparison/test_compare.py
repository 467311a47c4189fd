import importlib.util
import json
import math
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from unittest import mock

import pytest
import torch
from PIL import Image
from transformers import Trainer

from pylate_fastmaxsim.comparison.turns import Run, Turns
from pylate_fastmaxsim.comparison.verdict import MODES
from pylate_fastmaxsim.recipes.comparison import compare as comparing
from pylate_fastmaxsim.recipes.comparison.measure import measure
from pylate_fastmaxsim.recipes.load import load_recipe
from tests.support.command_line import fastmaxsim
from tests.support.comparisons import Page, RecordingGate, run_of, steps
from tests.support.recipe_runs import command
from tests.support.tiny_recipe import tiny, write

MEBIBYTE = 2**20


@pytest.mark.e2e
@pytest.mark.smoke
@pytest.mark.usefixtures("forked")
def test_a_comparison_runs_both_and_writes_numbers_and_a_picture(tmp_path, monkeypatch):
    # Modules in the working directory are not taken for libraries.
    (tmp_path / "tokenizers.py").write_text("")
    monkeypatch.chdir(tmp_path)
    recipe = tiny(tmp_path, training={"max_steps": 8, "learning_rate": 1e-3})
    recipe["model"]["build"]["dropout"] = 0.0
    done = command("compare", write(tmp_path, recipe), "model.document_length=64", "fast.stock_masking=true", code=0)
    comparison = json.loads((tmp_path / "out" / "compare.json").read_text())
    stock, fast = comparison["runs"]["stock"], comparison["runs"]["fast"]
    for run in (stock, fast):
        assert run["status"] == "finished" and run["steps"] == len(run["losses"]) == 8 and run["step_seconds"] > 0
        assert run["memory"]["peak"] >= run["memory"]["before"] > 50 * MEBIBYTE
    # Stock and fast begin with the same model, which is evaluated once.
    assert 0 < fast["untrained"]["ndcg@10"] <= 1 and "untrained" not in stock
    assert comparison["summary"]["largest_loss_difference"] < 1e-4 and fast["warnings"] == []
    turns = comparison["summary"]["turns"]
    # 2 steps of warm-up and two blocks of 3.
    assert comparison["summary"]["speedup"] == turns["ratio"] > 0 and turns["pairs"] == 2 and turns["cpu_ratio"] > 0
    assert [block["pair"] for block in stock["blocks"]] == [None, None, 0, 1] and not comparison["summary"]["restarted"]
    wall, taken = comparison["summary"]["wall_seconds"], fast["untrained_seconds"]
    # What only one of them did counts for neither, but for the whole.
    assert 0 < wall["stock"] + wall["fast"] < wall["whole"] - taken and "untrained_seconds" not in stock
    assert f"The whole comparison took {wall['whole']:.0f} s." in " ".join(done.stdout.split())
    with Image.open(tmp_path / "out" / "compare.png") as picture:
        assert picture.width > 1000
    assert all(said in done.stdout for said in ("median step", "compare.png", "compare.html"))
    page = Page((tmp_path / "out" / "compare.html").read_text())
    assert len(page.titles) == 6 and "Where a step's time goes" in page.titles and len(page.images) == 3
    assert f"{wall['stock']:.1f} s" in page.text and f"{wall['fast']:.1f} s" in page.text
    assert f"{fast['untrained']['ndcg@10']:.4f}" in page.text and f"{fast['ndcg@10']:.4f}" in page.text
    assert version("transformers") in page.text and "document_length: 64" in page.text
    assert not list((tmp_path / "out").glob("checkpoint-*"))
    files = {f"{mode}.{kind}" for mode in MODES for kind in ("log", "steps.jsonl")}
    assert {path.name for path in (tmp_path / "out" / "compare").iterdir()} == files
    lines = (tmp_path / "out" / "compare" / "fast.steps.jsonl").read_text().splitlines()
    assert [json.loads(line)["loss"] for line in lines] == fast["losses"]


def test_a_run_out_of_memory_is_a_result_and_ends_the_sweep(tmp_path, monkeypatch):
    ran = []

    def run(children, rounds):
        ran.extend(child.log.stem for child in children.values())
        fast = run_of(steps([1.0] * 4, encoded=50), memory={"before": 1, "peak": 2}, result={"ndcg@10": None})
        return Turns({mode: Run("out of memory") if mode == "stock" else fast for mode in children}, restarted=False)

    monkeypatch.setattr(comparing, "take_turns", run)
    comparison = comparing.compare(load_recipe(write(tmp_path, tiny(tmp_path))), batch_sizes=[16, 8])
    assert [run["status"] for run in comparison["runs"].values()] == ["out of memory", "finished"]
    points = {mode: [(point["batch_size"], point["status"]) for point in comparison["sweep"][mode]] for mode in MODES}
    assert points["stock"] == [(8, "out of memory"), (16, "not run")]
    assert points["fast"] == [(8, "finished"), (16, "finished")]
    assert ran == ["stock", "fast", "stock-8", "fast-8", "fast-16"]
    assert json.loads((tmp_path / "out" / "compare.json").read_text()) == comparison


def test_measuring_says_that_memory_ran_out(tmp_path, monkeypatch):
    monkeypatch.setattr(Trainer, "training_step", mock.Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory.")))
    assert measure(load_recipe(write(tmp_path, tiny(tmp_path))), RecordingGate())["status"] == "out of memory"


@pytest.mark.usefixtures("forked")
def test_a_batch_of_more_rows_than_there_are_is_refused_before_anything_runs(tmp_path):
    done = fastmaxsim(["compare", write(tmp_path, tiny(tmp_path)), "--sweep", "batch_size=8,1000"], code=2)
    assert done.stderr.startswith("fastmaxsim: --sweep: batch_size must be at most 60, as many rows as the data has")
    assert not (tmp_path / "out" / "compare").exists()


@pytest.mark.cuda
@pytest.mark.e2e
def test_on_a_gpu_nothing_is_padded_and_stock_runs_out_of_memory_first(tmp_path):
    if any(importlib.util.find_spec(peer) for peer in ("late_interaction_kernels", "flash_maxsim")):
        pytest.skip("PyLate scores through an installed fused-kernel package, which needs no similarity tensor")
    # A batch whose similarity tensor, batch x batch x 32 x 300 fp32 values, is larger than the GPU.
    batch = math.ceil(math.sqrt(1.1 * torch.cuda.get_device_properties(0).total_memory / (32 * 300 * 4)))
    packages = ["numpy", "scipy", "torch", "transformers"]
    recipe = tiny(tmp_path, data={"files": None, "source": "docstrings", "packages": packages, "max_rows": batch + 400})
    recipe["model"] |= {"query_length": 32, "document_length": 300}
    recipe["training"] |= {"use_cpu": False, "max_steps": 3}

    def compared(size: int) -> list[dict]:
        command("compare", write(tmp_path, recipe), f"training.per_device_train_batch_size={size}", code=0)
        return list(json.loads((tmp_path / "out" / "compare.json").read_text())["runs"].values())

    stock, fast = compared(64)
    assert fast["padding"] == 0 < stock["padding"] and fast["memory"]["peak"] < stock["memory"]["peak"]
    assert [run["status"] for run in compared(batch)] == ["out of memory", "finished"]


@pytest.mark.process
def test_a_run_that_fails_otherwise_shows_its_last_line_of_error(tmp_path, monkeypatch):
    # The children cannot import what they need; the parent already has.
    (tmp_path / "broken" / "accelerate").mkdir(parents=True)
    (tmp_path / "broken" / "accelerate" / "__init__.py").write_text("raise OSError('no such device')")
    file = write(tmp_path, tiny(tmp_path))
    monkeypatch.syspath_prepend(tmp_path / "broken")
    done = command("compare", file)
    assert done.exit_code == 1
    assert done.stderr.startswith("fastmaxsim: The stock run failed: OSError: no such device (see ")
    assert not (tmp_path / "out" / "compare.json").exists()


@pytest.mark.process
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_comparison_that_is_ended_ends_its_run_and_until_then_no_other_may_begin(number, tmp_path):
    def wait_for(done) -> None:
        deadline = time.monotonic() + 120
        while not done():
            assert time.monotonic() < deadline
            time.sleep(0.1)

    file = write(tmp_path, tiny(tmp_path, training={"max_steps": 1_000_000}))
    program = [sys.executable, "-m", "pylate_fastmaxsim.cli", "compare", str(file)]
    process = subprocess.Popen(program, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        wait_for((tmp_path / "out" / "compare" / "stock.log").exists)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        second = command("compare", file, "training.max_steps=1")
        assert second.exit_code == 2 and " is being compared in by another command" in second.stderr
    finally:
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == (-number if number == signal.SIGKILL else 128 + number)
    assert "Traceback" not in errors
    # Of SIGKILL the system ends it, a moment later. What has ended and nobody asked for has no program either.
    assert children
    wait_for(lambda: not any(Path(f"/proc/{child}/exe").exists() for child in children))


@pytest.mark.process
def test_a_run_that_the_system_kills_is_out_of_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(comparing, "python", lambda code: ["sh", "-c", "kill -KILL $$"])
    runs = comparing.compare(load_recipe(write(tmp_path, tiny(tmp_path))))["runs"]
    assert [(run["status"], run["steps"]) for run in runs.values()] == [("out of memory", 0)] * 2
