"""The suites of operators: what is wrong or fails shows. That implementations are exact: test_suites.py."""

import pytest
import torch

from benchmarks.operators import splade_head
from benchmarks.operators.compressed_operators import PACKED, fastest
from benchmarks.operators.measure import errors, timed

CPU = torch.device("cpu")


def test_wrong_scores_and_gradients_are_errors():
    torch.manual_seed(0)
    leaf = torch.rand(4, 5, requires_grad=True)
    exact = leaf.detach().double().requires_grad_()
    few = (torch.tensor([[0], [3]]), torch.tensor([1, 4]))

    def found(scores: torch.Tensor) -> dict:
        return errors(scores, {"own": leaf}, (2 * exact)[few], [exact], few)

    assert found(2 * leaf) == {"scores": pytest.approx(0, abs=1e-6), "own gradient": pytest.approx(0, abs=1e-6)}
    assert found(4 * leaf) == {"scores": pytest.approx(1), "own gradient": pytest.approx(1)}
    # A gradient beside the pairs that have one.
    assert found(2 * leaf + leaf.sum())["own gradient"] > 0.1
    assert found(leaf * torch.nan)["scores"] is None
    assert found((2 * leaf).detach()).keys() == {"scores"}


def test_a_failing_measure_leaves_its_sentence_and_the_others_stand():
    def full():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7 GiB")

    result = timed({"forward": [lambda: None], "forward_backward": [full]}, CPU)
    assert result["forward"]["ms"] > 0
    assert result["forward_backward"] == {"failure": "out of memory: CUDA out of memory"}


def test_a_batch_that_does_not_fit_is_a_result_and_no_larger_one_is_tried():
    class Full:
        asked = []

        def ask(self, cell):
            self.asked.append(cell["name"])
            return {"failure": "out of memory: CUDA out of memory"}

    cells = {f"{name}/stock": {"name": name} for name in ("64x256", "256x256", "16x256, 250k", "32x256, 250k")}
    assert len(list(splade_head.measured_by(Full(), cells))) == 3
    assert Full.asked == ["64x256", "256x256", "16x256, 250k"]


def test_formats_are_beside_the_fastest_peer():
    times = {"lik/fp8": 3.0, "lik/fp8 by token": 2.1, "flash/int8": 1.0, "fast/fp8": 0.7}
    cells = {f"{PACKED}/{name}": {"forward": {"ms": ms}} for name, ms in times.items()}
    assert fastest(cells, PACKED, ("lik", "flash"), "fp8") == ("lik", 2.1)
