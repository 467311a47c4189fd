"""The two passes of GradCache over the texts of a MultiVectorEncoder."""

from __future__ import annotations

import pytest
import torch
from sentence_transformers.multi_vector_encoder import losses

import pylate_fastmaxsim
from pylate_fastmaxsim.integrations.sentence_transformers import encoder as sentence_transformers_encoder
from tests.support.multi_vector import COUNT, assert_equal, batch_of, found, load, run

CACHED = losses.CachedMultiVectorMultipleNegativesRankingLoss


@pytest.fixture
def model(encoder):
    return load(encoder("bert", hidden_dropout_prob=0.3))


@pytest.fixture
def undropped(encoder):
    """A model and its loss."""
    model = load(encoder("bert"))
    return model, CACHED(model, mini_batch_size=3)


@pytest.fixture
def embedded(monkeypatch) -> list[torch.Tensor]:
    """What the first pass and then the second one made, in the order of their calls."""
    made, stock = [], CACHED.embed_minibatch_iter

    def embed(self, **kwargs):
        for result in stock(self, **kwargs):
            made.append(result[0].detach())
            yield result

    monkeypatch.setattr(CACHED, "embed_minibatch_iter", embed)
    return made


def assert_passes_alike(embedded: list[torch.Tensor]) -> None:
    half = len(embedded) // 2
    assert half
    for own, other in zip(embedded[:half], embedded[half:], strict=True):
        assert own.dtype == other.dtype and torch.equal(own, other)


@pytest.mark.parametrize("inside", [False, True])
def test_a_backward_inside_and_outside_of_autocast(model, mode, embedded, inside):
    """Outside, stock makes the second pass in float32; inside, autocast keeps weights cast without gradients."""
    model.float()
    loss = CACHED(model, mini_batch_size=3)
    pylate_fastmaxsim.enable()
    with torch.autocast("cpu", torch.bfloat16):
        value = loss(batch_of(model))
        if inside:
            value.backward()
    if not inside:
        value.backward()
    assert_passes_alike(embedded)
    for name, weight in model.named_parameters():
        assert "pooler" in name or (weight.grad is not None and weight.grad.isfinite().all()), name


def test_what_is_decided_in_the_first_pass_holds_in_the_second(model, packed, embedded, monkeypatch):
    """Wider texts of the same batch may be decided about in between."""
    pylate_fastmaxsim.enable()
    model(batch_of(model)[1], task="document")  # prepares the encoder for packed texts
    decisions = iter(["packed", "padded", "grouped"])
    monkeypatch.setattr(sentence_transformers_encoder, "mode_for", lambda *args, **kwargs: next(decisions))
    # As many calls as there are columns: a fourth question would have no answer.
    CACHED(model, mini_batch_size=COUNT)(batch_of(model)).backward()
    assert_passes_alike(embedded)


def test_options_that_change_between_the_passes(undropped, packed):
    """Which puts encoders back that were prepared for packed texts."""
    model, loss = undropped
    stock = run(model, loss)
    pylate_fastmaxsim.enable()
    model.zero_grad(set_to_none=True)
    with pylate_fastmaxsim.enabled(compile=True):
        value = loss(batch_of(model))
    value.backward()
    assert_equal(found(model, value), stock)


def test_hooks_on_weights_see_the_gradients_of_each_mini_batch(undropped, mode):
    model, loss = undropped
    for weight in model.parameters():
        weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    stock = run(model, loss)
    pylate_fastmaxsim.enable()
    for _ in range(2):
        assert_equal(run(model, loss), stock)


def test_the_second_pass_asks_the_device_for_nothing(undropped, packed, monkeypatch):
    """Neither where texts end nor how long the longest is: each answer would have to be waited for."""
    model, loss = undropped
    stock = run(model, loss)
    pylate_fastmaxsim.enable()
    value = loss(batch_of(model))
    model.zero_grad(set_to_none=True)
    with monkeypatch.context() as asked:
        # Of those that wait, these are called where texts are looked at, and not by the stand-in for attention.
        for name in ("nonzero", "item", "tolist"):
            asked.setattr(torch.Tensor, name, lambda *args, name=name: pytest.fail(f"{name} waits for the device"))
        value.backward()
    assert_equal(found(model, value), stock)


def test_texts_that_are_written_to_between_the_passes(undropped, mode):
    """As by a module that leaves tokens out: the second pass encodes what they are then."""
    model, loss = undropped

    def step() -> tuple:
        model.zero_grad(set_to_none=True)
        batch = batch_of(model)
        value = loss(batch)
        batch[1]["input_ids"][:, 2] = 7
        value.backward()
        return found(model, value)

    stock = step()
    pylate_fastmaxsim.enable()
    for _ in range(2):
        assert_equal(step(), stock)
