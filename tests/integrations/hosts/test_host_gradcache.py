"""The two passes of GradCache over the texts of a batch: the second encodes as the first did."""

import pytest
import torch

from tests.support.compared import found
from tests.support.hosts import OF_SENTENCE_TRANSFORMERS, each_host, encoder_calls


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("host", each_host())
def test_with_dropout_and_a_backward_inside_or_outside_of_autocast(encoder, mode, host, inside):
    """Outside, stock makes the second pass in float32; inside, autocast keeps weights cast without gradients."""
    model = host.model(encoder, hidden_dropout_prob=0.3).float()
    step = host.losses["cached"](model)
    made = encoder_calls(model)
    host.enable()
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(2):  # to decide how wide and narrow columns are encoded takes calls of its own
            step.value()
        made.clear()
        value = step.value()
        state = torch.get_rng_state()
        if inside:
            value.backward()
    if not inside:
        value.backward()
    assert torch.equal(torch.get_rng_state(), state)
    half = len(made) // 2
    assert half >= 3
    for first, second in zip(made[:half], made[half:], strict=True):
        assert first.dtype == second.dtype and torch.equal(first, second)
    for name, weight in model.named_parameters():
        assert "pooler" in name or (weight.grad is not None and weight.grad.isfinite().all()), name


# Of what waits, these are called where texts are looked at, and not by what stands in for kernels.
WAITS = [("MultiVectorEncoder", ("nonzero", "item", "tolist")), ("SparseEncoder", ("nonzero", "item"))]


@pytest.mark.parametrize("host, names", [param for host, names in WAITS for param in each_host([host], names)])
def test_the_second_pass_asks_the_device_for_nothing(encoder, packed, monkeypatch, host, names):
    """Neither where texts end nor how long the longest is: each answer would have to be waited for."""
    model = host.model(encoder)
    step = host.losses["cached"](model)
    stock = step.run()
    host.enable()
    value = step.value()
    model.zero_grad()
    with monkeypatch.context() as asked:
        for name in names:
            asked.setattr(torch.Tensor, name, lambda *args, name=name: pytest.fail(f"{name} waits for the device"))
        value.backward()
    step.assert_equal(found(model, value), stock)


@pytest.mark.parametrize("host", each_host(OF_SENTENCE_TRANSFORMERS))
def test_texts_that_are_written_to_between_the_passes(encoder, mode, host):
    """As by a module that leaves tokens out: the second pass encodes what they are then."""
    model = host.model(encoder)

    def run() -> tuple:
        model.zero_grad()
        step = host.losses["cached"](model)
        value = step.value()
        step.batch[1]["input_ids"][:, 2] = 7
        value.backward()
        return found(model, value)

    stock = run()
    host.enable()
    for _ in range(2):
        host.losses["cached"](model).assert_equal(run(), stock)


@pytest.mark.parametrize("host", each_host())
def test_hooks_on_weights_see_the_gradients_of_each_mini_batch(encoder, mode, host):
    model = host.model(encoder)
    step = host.losses["cached"](model)
    for weight in model.parameters():
        weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    stock = step.run()
    host.enable()
    for _ in range(2):
        step.assert_equal(step.run(), stock)
