import pytest
import torch

from benchmarks.operators.measure import errors


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
