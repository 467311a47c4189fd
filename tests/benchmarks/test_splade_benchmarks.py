"""The benchmarks of SPLADE: what shows in a cell, and both commands on a CPU."""

import json

import pytest
import torch
from benchmarked import run_benchmark
from benchmarks.operators.splade_table import docs_table

from benchmarks.documents import gpu
from benchmarks.harness.records import load
from benchmarks.harness.turns import ratio, speed
from benchmarks.operators import splade as head
from benchmarks.training import splade_step
from benchmarks.training.multi_vector_step import cell_name

CPU = torch.device("cpu")
MADE = {
    "device": "NVIDIA H100 80GB HBM3",
    **dict.fromkeys(("torch", "triton", "sentence-transformers", "date"), "-"),
}


def test_all_implementations_compute_the_same():
    inputs = head.make_inputs(head.SHAPES["tiny"], False, CPU)
    grad = torch.randn(3, 500)
    for entry, bound in (("fast", 1e-6), ("padded", 1e-6), ("stock", 1e-2)):
        cast = grad.bfloat16() if entry == "stock" else grad
        found = head.errors(head.value_function(entry), inputs, entry, cast)
        assert found["values"] < bound
        # Ours are rounded to bfloat16 once; bfloat16 logits of stock choose other tokens.
        assert max(found.values()) < (0.3 if entry == "stock" else 1e-2), (entry, found)


def test_the_bias_leaves_as_many_positive_values_as_a_trained_model():
    inputs = head.make_inputs(head.SHAPES["tiny"], True, CPU)
    positive = (head.value_function("fast")(inputs) > 0).float().mean()
    assert positive == pytest.approx(head.POSITIVE, rel=0.5)


def timed(ms: float, mib: float = 100) -> dict:
    each = {"ms": ms, "peak_bytes": mib * 2**20}
    density = {"forward": each, "forward_backward": each, "positive": 0.3}
    return {"dense": density, "sparse": density, "environment": MADE}


def test_a_batch_that_does_not_fit_is_a_result_and_no_larger_one_is_tried(tmp_path, monkeypatch):
    class Full:
        asked = []

        def ask(self, cell):
            self.asked.append(cell["shape"])
            failed = {"failure": "out of memory: CUDA out of memory"}
            return {**timed(1), "dense": {"forward": failed, "forward_backward": failed}}

    monkeypatch.setattr("sys.argv", ["splade", "--results", str(tmp_path / "head.json")])
    parser = head.argparse.ArgumentParser()
    head.add_options(parser, None, timeout=1)
    results = head.Results(parser.parse_args())
    head.run(results, Full(), "stock", ["64x256", "256x256", "16x256, 250k", "32x256, 250k"])
    assert Full.asked == ["64x256", "256x256", "16x256, 250k"]
    assert "| 16x256, 250k | | out of memory | | |" in docs_table(results.cells)
    head.run(results, Full(), "padded", ["32x256, 250k"])
    assert len(results.cells) == 3


def step(ms: float, gib: float) -> dict:
    return {"status": "ok", "step_ms": ms, "peak_gib": gib, "environment": MADE}


def test_the_table_of_steps():
    cells = {
        cell_name(128, "stock", False): {**step(200, 40), "batch": 128},
        cell_name(128, "fast", False): {**step(50, 10.5), "batch": 128},
        cell_name(128, "fast", True): {**step(40, 9), "batch": 128},
        cell_name(256, "stock", False): {"status": "out of memory", "batch": 256},
        cell_name(8, "stock", False): {**step(20, 4), "batch": 8},
        cell_name(8, "fast", False): {**step(16, 3), "batch": 8},
    }
    table = splade_step.markdown({"cells": cells})
    assert "| 50 ms, 10.5 GiB (4.00x) |" in table and "out of memory" in table
    assert gpu(cells[cell_name(128, "stock", False)]) == "H100"


def test_speed_is_that_of_pairs_of_blocks_where_cells_took_turns():
    stock, fast = {"step_ms": 200, "turns": "a"}, {"step_ms": 100, "turns": "a"}
    judged = {"ratio": 1.87, "busy": False}
    assert speed(fast, stock) == "2.00x"
    assert speed({**fast, "against_first": judged}, stock) == "1.87x"
    assert speed({**fast, "against_first": {**judged, "busy": True}}, stock) == "about 1.9x, busy machine"
    # Stock was measured again.
    assert ratio({**fast, "against_first": judged}, {"step_ms": 200}) == 2.0


@pytest.mark.bench
def test_the_command_measures_every_implementation(tmp_path):
    target = tmp_path / "head.json"
    entries = ["stock", "fast", "padded"]  # inductor takes half a minute
    printed = run_benchmark("operators.splade", "--shapes", "tiny", "--entries", *entries, "--results", str(target))
    cells = json.loads(target.read_text())["cells"]
    assert list(cells) == [f"tiny/{entry}" for entry in entries]
    assert all(
        cell[density]["forward_backward"]["ms"] > 0 for cell in cells.values() for density in ("dense", "sparse")
    )
    assert "times compiled" in printed


@pytest.mark.bench
def test_steps_of_both_paths_are_measured(tmp_path):
    target = tmp_path / "step.json"
    small = ["--batches", "2", "--layers", "1", "--hidden", "64", "--steps", "8", "--warmup", "1", "--different", "1"]
    printed = run_benchmark("splade_step", "--compile", "no", *small, "--results", str(target))
    stock, fast = load(target)["cells"].values()
    assert stock["losses"][0] == pytest.approx(fast["losses"][0], rel=2e-2) and 0 < stock["padding"] < 1
    # By turns: 2 steps of warm-up, and two blocks of 3.
    assert stock["turns"] == fast["turns"] and fast["against_first"]["pairs"] == 2 and len(fast["each_ms"]) == 8
    assert f"({speed(fast, stock)}) |" in printed
