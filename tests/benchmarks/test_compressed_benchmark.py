"""The benchmark of compressed documents: what its ways compute, what the bounds conclude, and the command on a CPU."""

from __future__ import annotations

import json
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from benchmarked import run_benchmark
from benchmarks.operators.compressed_table import PACKED, docs_table, fastest, ratios

from benchmarks.operators import compressed as command
from benchmarks.operators import compressed_cells as cells_module

CPU = torch.device("cpu")


@pytest.mark.parametrize("shape", cells_module.TINY, ids=lambda shape: shape.name)
def test_scores_are_those_of_the_stored_numbers(shape):
    inputs = cells_module.input_sets(shape, CPU)[0]
    for competitor, bound in (("fast", 1e-6), ("naive", 1e-2)):  # similarities of einsum are rounded to bfloat16
        for form in cells_module.forms(competitor, shape):
            case = cells_module.COMPETITORS[competitor](inputs, form)
            found = cells_module.errors(case, inputs)
            assert found["definition"] < bound, (competitor, form, found)
            # Another vector than the stored one would be seen; two bits of 32 numbers are coarse.
            assert found["uncompressed"] < (0.5 if form.startswith("residual") else 0.03), (competitor, form, found)


def test_a_wrong_score_is_an_error():
    inputs = cells_module.input_sets(cells_module.TINY[0], CPU)[0]
    case = cells_module.fast(inputs, "int8 by token")
    wrong = cells_module.Case(lambda: 1.1 * case.score(), case.definition, case.stored_bytes)
    assert cells_module.errors(wrong, inputs)["definition"] == pytest.approx(0.1, rel=0.1)


@pytest.mark.parametrize("bits", [2, 4])
def test_mirrored_bytes_hold_the_first_number_in_their_low_bits(bits):
    codec = cells_module.codec(bits, 32, 8, CPU)
    every = torch.arange(256, dtype=torch.uint8)
    mirrored = cells_module.mirrored_bytes(every).int()
    for place in range(8 // bits):
        bucket = (mirrored >> (place * bits)) & (2**bits - 1)
        assert torch.equal(codec.weights[bucket], codec.byte_values[:, place])


def test_the_lists_of_autotuned_kernels_are_cut(monkeypatch):
    Autotuner = type("Autotuner", (), {})
    kernel = Autotuner()
    tiles = [(16, 16, 2), (64, 64, 4), (16, 32, 2), (128, 64, 8)]
    kernel.configs = [SimpleNamespace(kwargs={"BLOCK_Q": q, "BLOCK_D": d}, num_warps=w) for q, d, w in tiles]
    module = ModuleType("some_peer")
    module.kernel, module.other = kernel, object()
    monkeypatch.setitem(sys.modules, "some_peer", module)
    kept = cells_module.limit_autotuning("some_peer")
    assert [config.kwargs["BLOCK_Q"] for config in kernel.configs] == [64, 128, 16]
    assert list(kept) == ["some_peer.kernel"] and len(kept["some_peer.kernel"]) == cells_module.AUTOTUNED_CONFIGS


def test_what_takes_minutes_is_measured_last():
    order = [(shape.name, form) for shape, _, form in command.wanted(cells_module.SHAPES, ["fast", "lik"])]
    assert order[0] == (MANY, "bf16")
    assert order[-2:] == [(PACKED, "residual 4 bits, packed"), (PACKED, "residual 2 bits, packed")]


MANY, ONE = "256x32.512x300", "1x32.10000x300"
VERSIONS = ("device", "torch", "triton", "date", "late-interaction-kernels", "flash-maxsim")


def forward(ms: float) -> dict:
    return {"forward": {"ms": ms}}


def test_formats_are_beside_the_fastest_peer():
    cells = {
        f"{MANY}/fast/bf16": forward(1.0),
        f"{MANY}/fast/int8 by document": forward(0.6),
        f"{MANY}/fast/fp8": forward(0.7),
        f"{MANY}/fast/residual 4 bits": forward(1.05),
        f"{MANY}/lik/fp8": forward(3.0),
        f"{MANY}/lik/fp8 by token": forward(2.1),
        f"{MANY}/lik/residual 4 bits, padded": {"forward": {"failure": "out of memory"}},
        f"{ONE}/fast/residual 4 bits": forward(0.5),
        f"{ONE}/lik/residual 4 bits, packed": forward(6.0),
        f"{PACKED}/fast/int8 by document": forward(3.0),
        f"{PACKED}/flash/int8, 16-bit queries": forward(24.0),
        f"{PACKED}/lik/fp8": {"skipped": "the deadline"},
    }
    assert fastest(cells, MANY, ("lik", "flash"), "fp8") == ("lik", 2.1)
    assert ratios(cells)[f"{MANY}/lik/fp8"] == pytest.approx(1 / 3)
    content = {"cells": cells, "environment": dict.fromkeys(VERSIONS, "-")}
    assert "| fp8 | 0.7 ms | 1.43x | 2.1 ms (late-interaction-kernels) | 3.00x | | |" in docs_table(content)


@pytest.mark.bench
def test_the_command_measures_what_it_can(tmp_path):
    pytest.importorskip("matplotlib")
    target = tmp_path / "tiny.json"
    printed = run_benchmark("operators.compressed", "--tiny", "--results", str(target))
    content = json.loads(target.read_text())
    cells = content["cells"]
    for name, shape in content["shapes"].items():
        ours = [cell for key, cell in cells.items() if key.startswith(f"{name}/fast/")]
        assert len(ours) == 6 and all(cell["forward"]["ms"] > 0 and cell["query_gradient"]["ms"] > 0 for cell in ours)
        assert content["ratios"][f"{name}/naive/fp8"] > 0 and shape["dim"] == 32
    # A peer that is missing, or that needs a GPU, is recorded and ends nothing.
    assert all("failure" in cell or "stored_bytes" in cell for cell in cells.values())
    assert "| 3x4 against 5x9 | fp8 |" in printed and target.with_suffix(".png").exists()
    late = run_benchmark(
        "operators.compressed", "--tiny", "--deadline", "0", "--competitors", "naive", "--results", str(target)
    )
    skipped = json.loads(target.read_text())["cells"].values()
    assert [cell["skipped"] for cell in skipped] == ["the deadline"] * 10 and "skipped: the deadline" in late
