"""The suites of operators: every implementation computes the same, and a wrong one shows in the errors."""

from __future__ import annotations

import sys
from dataclasses import asdict
from types import ModuleType, SimpleNamespace

import pytest
import torch

from benchmarks.operators import compressed_cases, head, pooling_operators, splade_head
from benchmarks.operators.attention_tiles import HEADS, LENGTHS, trials
from benchmarks.operators.competitors import Entry, fast_entries, make_inputs
from benchmarks.operators.compressed_operators import PACKED, fastest
from benchmarks.operators.head_entries import SHAPES as HEAD_SHAPES
from benchmarks.operators.measure import errors, measure_entry
from benchmarks.operators.operators import measure
from benchmarks.operators.shapes import BY_NAME
from pylate_fastmaxsim.kernels.attention import launch

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["tiny", "tiny-candidates", "tiny-ragged"])
def test_maxsim_is_exact(name):
    shape = BY_NAME[name]
    for competitor in ("fast", "einsum"):
        cell = {"kind": "shape", "shape": asdict(shape), "competitor": competitor}
        for entry in measure(cell)["entries"].values():
            assert set(entry["errors"]) == {"scores", "query gradient", "document gradient"}, entry["errors"]
            bound = 1e-6 if shape.dtype == "float32" else 5e-3
            assert all(error < bound for error in entry["errors"].values()), entry["errors"]
            assert all(entry[m]["ms"] > 0 for m in ("forward", "forward_winners", "forward_backward"))


@pytest.mark.parametrize("name", ["tiny", "tiny-candidates"])
def test_the_head_is_exact(name):
    for entry in ("fast", "einsum"):
        cell = head.measure({"shape": asdict(HEAD_SHAPES[name]), "entry": entry})
        assert set(cell["errors"]) == {"scores", "query gradient", "hidden gradient", "weight gradient"}
        assert all(error < 1e-6 for error in cell["errors"].values()), entry


def test_a_failing_entry_leaves_its_sentence_and_the_others_stand():
    def no_gradient(inputs):
        if inputs.queries.requires_grad:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7 GiB")
        return inputs.queries.new_zeros(3, 5)

    shape = BY_NAME["tiny"]
    result = measure_entry(Entry("broken", no_gradient), shape, [make_inputs(shape, torch.device("cpu"), 0)])
    assert result["forward"]["ms"] > 0
    assert result["forward_backward"] == {"failure": "out of memory: CUDA out of memory"}


def test_wrong_scores_and_gradients_show_in_the_errors():
    shape = BY_NAME["tiny"]
    inputs = make_inputs(shape, torch.device("cpu"), 0)
    right = fast_entries(shape)[0]
    doubled = errors(Entry("doubled", lambda x: 2 * right.score(x)), shape, inputs)
    assert all(error == pytest.approx(1, abs=1e-5) for error in doubled.values())
    missing = errors(Entry("not a number", lambda x: right.score(x) * torch.nan), shape, inputs)
    assert missing["scores"] is None


def batch(ragged: bool = False) -> pooling_operators.Batch:
    return pooling_operators.batches(pooling_operators.QUICK[0], ragged, CPU)[0].differentiable()


@pytest.mark.parametrize("name", pooling_operators.POOLINGS)
def test_poolings_are_the_same_by_all_competitors(name):
    pooling = pooling_operators.VALUES[name]
    for competitor, bound in (("fast", 1e-6), ("ragged", 1e-6), ("einsum", 5e-3)):
        score = pooling_operators.score_function(competitor, pooling)
        found = pooling_operators.errors(score, pooling, batch(competitor == "ragged"))
        assert found["scores"] < bound, (competitor, found)
        # Ours are rounded to bfloat16 once; bfloat16 similarities of einsum choose other tokens.
        limit = 0.2 if competitor == "einsum" else 5e-3
        assert max(found["query gradient"], found["document gradient"]) < limit, (competitor, found)


def test_a_gradient_beside_the_pairs_that_have_one_is_an_error():
    pooling = pooling_operators.VALUES["softmax"]
    right = pooling_operators.score_function("fast", pooling)
    found = pooling_operators.errors(lambda x: right(x) + 0.1 * x.documents.values.float().sum(), pooling, batch())
    assert found["document gradient"] > 0.1 and found["scores"] > 0.1


def test_implementations_of_splade_compute_the_same():
    inputs = splade_head.make_inputs(splade_head.SHAPES["tiny"], False, CPU)
    grad = torch.randn(3, 500)
    for entry, bound in (("fast", 1e-6), ("padded", 1e-6), ("stock", 1e-2)):
        cast = grad.bfloat16() if entry == "stock" else grad
        found = splade_head.errors(splade_head.value_function(entry), inputs, entry, cast)
        assert found["values"] < bound
        # Ours are rounded to bfloat16 once; bfloat16 logits of stock choose other tokens.
        assert max(found.values()) < (0.3 if entry == "stock" else 1e-2), (entry, found)


def test_the_bias_leaves_as_many_positive_values_as_a_trained_model():
    inputs = splade_head.make_inputs(splade_head.SHAPES["tiny"], True, CPU)
    positive = (splade_head.value_function("fast")(inputs) > 0).float().mean()
    assert positive == pytest.approx(splade_head.POSITIVE, rel=0.5)


def test_a_batch_that_does_not_fit_is_a_result_and_no_larger_one_is_tried():
    class Full:
        asked = []

        def ask(self, cell):
            self.asked.append(cell["name"])
            return {"failure": "out of memory: CUDA out of memory"}

    cells = {f"{name}/stock": {"name": name} for name in ("64x256", "256x256", "16x256, 250k", "32x256, 250k")}
    assert len(list(splade_head.measured_by(Full(), cells))) == 3
    assert Full.asked == ["64x256", "256x256", "16x256, 250k"]


@pytest.mark.parametrize("shape", compressed_cases.TINY, ids=lambda shape: shape.name)
def test_compressed_scores_are_those_of_the_stored_numbers(shape):
    inputs = compressed_cases.input_sets(shape, CPU)[0]
    for competitor, bound in (("fast", 1e-6), ("naive", 1e-2)):  # similarities of einsum are rounded to bfloat16
        for form in compressed_cases.forms(competitor, shape):
            case = compressed_cases.CASES[competitor](inputs, form)
            found = compressed_cases.errors(case, inputs)
            assert found["definition"] < bound, (competitor, form, found)
            # Another vector than the stored one would be seen; two bits of 32 numbers are coarse.
            assert found["uncompressed"] < (0.5 if form.startswith("residual") else 0.03), (competitor, form, found)


def test_a_wrong_compressed_score_is_an_error():
    inputs = compressed_cases.input_sets(compressed_cases.TINY[0], CPU)[0]
    case = compressed_cases.fast(inputs, "int8 by token")
    wrong = compressed_cases.Case(lambda: 1.1 * case.score(), case.definition, case.stored_bytes)
    assert compressed_cases.errors(wrong, inputs)["definition"] == pytest.approx(0.1, rel=0.1)


@pytest.mark.parametrize("bits", [2, 4])
def test_mirrored_bytes_hold_the_first_number_in_their_low_bits(bits):
    codec = compressed_cases.codec(bits, 32, 8, CPU)
    every = torch.arange(256, dtype=torch.uint8)
    mirrored = compressed_cases.mirrored_bytes(every).int()
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
    kept = compressed_cases.limit_autotuning("some_peer")
    assert [config.kwargs["BLOCK_Q"] for config in kernel.configs] == [64, 128, 16]
    assert list(kept) == ["some_peer.kernel"] and len(kept["some_peer.kernel"]) == compressed_cases.AUTOTUNED_CONFIGS


def test_formats_are_beside_the_fastest_peer():
    times = {"lik/fp8": 3.0, "lik/fp8 by token": 2.1, "flash/int8": 1.0, "fast/fp8": 0.7}
    cells = {f"{PACKED}/{name}": {"forward": {"ms": ms}} for name, ms in times.items()}
    assert fastest(cells, PACKED, ("lik", "flash"), "fp8") == ("lik", 2.1)


def test_each_length_has_a_choice_that_holds_its_texts():
    for dim in HEADS:
        found = trials(dim, 0.1)
        for part in ("forward", "backward"):
            for length in LENGTHS:
                tried = [trial for trial in found if (trial.part, trial.length) == (part, length)]
                assert len(tried) > 1 and all(trial.divided or trial.tile.block >= length for trial in tried)


def test_the_tables_of_the_kernels_are_among_the_choices():
    tried = {(trial.part, trial.tile, trial.divided) for trial in trials(64, 0.0)}
    for part, table in (("forward", launch.FORWARD), ("backward", launch.BACKWARD)):
        for tiles in table.values():
            assert {(part, tile, False) for tile in tiles.short} | {(part, tiles.long, True)} <= tried
