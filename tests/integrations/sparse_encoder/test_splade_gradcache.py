"""The two passes of GradCache over the texts of a SparseEncoder."""

from __future__ import annotations

import pytest
import torch
from sentence_transformers.sparse_encoder import losses

import pylate_fastmaxsim
from tests.support.sparse_encoders import splade
from tests.support.splade_steps import CACHED, assert_equal, batch_of, run, splade_loss

if not CACHED:
    pytest.skip("GradCache came with release 5.3", allow_module_level=True)

CONTRASTIVE = losses.SparseMultipleNegativesRankingLoss


@pytest.fixture
def embedded(monkeypatch) -> list[torch.Tensor]:
    """What the first pass and then the second one made, in the order of their calls."""
    made, stock = [], CACHED["kind"].embed_minibatch_iter

    def embed(self, **kwargs):
        for result in stock(self, **kwargs):
            made.append(result[0].detach())
            yield result

    monkeypatch.setattr(CACHED["kind"], "embed_minibatch_iter", embed)
    return made


def assert_passes_alike(embedded: list[torch.Tensor]) -> None:
    half = len(embedded) // 2
    assert half
    for own, other in zip(embedded[:half], embedded[half:], strict=True):
        assert own.dtype == other.dtype and torch.equal(own, other)


@pytest.mark.parametrize("inside", [False, True])
def test_a_backward_inside_and_outside_of_autocast(encoder, mode, embedded, inside):
    """With dropout. Outside, stock makes the second pass in float32; inside, it keeps weights cast without gradients."""
    model = splade(encoder("bert", masked_lm=True, hidden_dropout_prob=0.3)).float()
    loss, batch = splade_loss(model, CONTRASTIVE, **CACHED), batch_of(model, 3)
    pylate_fastmaxsim.enable()
    with torch.autocast("cpu", torch.bfloat16):
        value = sum(loss([dict(column) for column in batch]).values())
        if inside:
            value.backward()
    if not inside:
        value.backward()
    assert_passes_alike(embedded)
    for name, weight in model.named_parameters():
        assert weight.grad is not None and weight.grad.isfinite().all(), name


@pytest.fixture
def undropped(encoder):
    """A model and its loss."""
    model = splade(encoder("bert", masked_lm=True))
    return model, splade_loss(model, CONTRASTIVE, **CACHED)


def test_the_second_pass_asks_the_device_for_nothing(undropped, packed, monkeypatch):
    model, loss = undropped
    batch = batch_of(model, 3)
    stock = run(model, loss, batch)
    pylate_fastmaxsim.enable()
    value = sum(loss([dict(column) for column in batch]).values())
    model.zero_grad(set_to_none=True)
    with monkeypatch.context() as asked:
        # Of those that wait, these are called where texts are looked at, and not by what stands in for kernels.
        for name in ("nonzero", "item"):
            asked.setattr(torch.Tensor, name, lambda *args, name=name: pytest.fail(f"{name} waits for the device"))
        value.backward()
    assert_equal((value.detach(), {name: weight.grad for name, weight in model.named_parameters()}), stock)


def test_texts_that_are_written_to_between_the_passes(undropped, mode):
    """As by a module that leaves tokens out: the second pass encodes what they are then."""
    model, loss = undropped

    def step() -> tuple:
        model.zero_grad(set_to_none=True)
        batch = batch_of(model, 3)
        value = sum(loss(batch).values())
        batch[1]["input_ids"][:, 2] = 7
        value.backward()
        return value.detach(), {name: weight.grad for name, weight in model.named_parameters()}

    stock = step()
    pylate_fastmaxsim.enable()
    for _ in range(2):
        assert_equal(step(), stock)
