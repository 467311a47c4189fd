"""The benchmark of pooling: what shows in a cell, and the command on a CPU."""

from __future__ import annotations

import json

import pytest
import torch
from benchmarked import run_benchmark
from benchmarks.operators.pooling_table import POOLINGS, docs_table, ratios

from benchmarks.operators import pooling as benchmark

CPU = torch.device("cpu")


def batch(ragged: bool = False) -> benchmark.Batch:
    return benchmark.batches(benchmark.QUICK[0], ragged, CPU)[0].differentiable()


@pytest.mark.parametrize("name", POOLINGS)
def test_all_competitors_compute_the_same(name):
    pooling = benchmark.VALUES[name]
    for competitor, bound in (("fast", 1e-6), ("ragged", 1e-6), ("einsum", 5e-3)):
        score = benchmark.score_function(competitor, pooling)
        found = benchmark.errors(score, pooling, batch(competitor == "ragged"))
        assert found["scores"] < bound, (competitor, found)
        # Ours are rounded to bfloat16 once; bfloat16 similarities of einsum choose other tokens.
        limit = 0.2 if competitor == "einsum" else 5e-3
        assert max(found["query gradient"], found["document gradient"]) < limit, (competitor, found)


def test_a_gradient_beside_the_pairs_that_have_one_is_an_error():
    pooling = benchmark.VALUES["softmax"]
    right = benchmark.score_function("fast", pooling)
    found = benchmark.errors(lambda x: right(x) + 0.1 * x.documents.values.float().sum(), pooling, batch())
    assert found["document gradient"] > 0.1 and found["scores"] > 0.1


def test_einsum_out_of_memory_is_recorded(monkeypatch):
    def no_memory(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")

    monkeypatch.setattr(benchmark, "plain_scores", no_memory)
    cell = benchmark.measure([batch()], "einsum", benchmark.VALUES["softmax"])
    for what in ("forward", "forward_backward", "errors"):
        assert cell[what] == {"failure": "out of memory: CUDA out of memory"}
    cells = {"256x32.512x300/softmax/einsum": cell, "256x32.512x300/softmax/fast": timed(1)}
    assert ratios(cells) == {}
    content = {"cells": cells, "environment": dict.fromkeys(("device", "torch", "triton", "date"), "-"), "peers": {}}
    assert "| 1 ms, 100 MiB | | out of memory | | |" in docs_table(content)


def timed(ms: float, mib: float = 100) -> dict:
    return {"forward": {"ms": ms}, "forward_backward": {"ms": ms, "beyond_gradients_bytes": mib * 2**20}}


@pytest.mark.bench
def test_the_command_measures_every_pooling(tmp_path):
    pytest.importorskip("matplotlib")
    target = tmp_path / "quick.json"
    printed = run_benchmark(
        *("operators.pooling", "--quick", "--competitors", "fast", "ragged", "einsum", "--results", str(target))
    )
    content = json.loads(target.read_text())
    assert [sum(name.endswith(each) for name in content["cells"]) for each in ("fast", "ragged", "einsum")] == [5, 3, 5]
    assert content["ratios"]["3x8.5x24/top-4"]["einsum"]["forward_backward"] > 0
    assert set(content["peers"]) == {"late-interaction-kernels", "flash-maxsim"}
    assert "| 3x8 against 5x24 | `LogSumExp(0.1)` |" in printed and target.with_suffix(".png").exists()
