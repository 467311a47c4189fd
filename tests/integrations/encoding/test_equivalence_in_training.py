"""What the trial on the first batch finds out about models in training, and that it leaves them as they were."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from pylate import losses
from torch import nn
from transformers.integrations.neftune import neftune_post_forward_hook

import pylate_fastmaxsim
from pylate_fastmaxsim.integrations.encoding import modes
from tests.support.compared import assert_equal, run
from tests.support.encoded import assert_encodes_as_stock, batch_of, mode_of
from tests.support.models import Behind, features, load_model


class _Normalised(Behind):
    def __init__(self, dense):
        super().__init__(dense)
        self.norm = nn.BatchNorm1d(16)

    def change(self, features):
        embeddings = features["token_embeddings"]
        features["token_embeddings"] = self.norm(embeddings.flatten(0, 1)).view_as(embeddings)
        return features


def _add_norm(model):
    model[1] = _Normalised(model[1]).to(model.dtype)


def _add_noise(model):
    embeddings = model[0].auto_model.get_input_embeddings()
    embeddings.neftune_noise_alpha = 5.0
    embeddings.register_forward_hook(neftune_post_forward_hook)


def state_of(model):
    """What a call may change beside gradients: parameters, buffers, and what modules keep in plain attributes."""
    plain = {
        (name, key): list(value) if isinstance(value, list) else value
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, (bool, int, float, str, type(None), list))
    }
    return {name: value.clone() for name, value in model.state_dict().items()}, plain


def assert_deciding_changes_nothing(model, columns):
    buffers, plain = state_of(model)
    random_state = torch.get_rng_state()
    mode = modes.mode_for(model, columns, None)
    assert torch.equal(random_state, torch.get_rng_state())
    assert all(weight.grad is None for weight in model.parameters())
    torch.testing.assert_close(state_of(model)[0], buffers, rtol=0, atol=0)
    assert state_of(model)[1] == plain
    return mode


@pytest.mark.parametrize(
    "change, said",
    [
        (_add_norm, "BatchNorm1d normalises by all tokens of a call"),
        (_add_noise, "NEFTune scales its noise by the width of a call"),
    ],
)
def test_what_depends_in_training_on_all_tokens_of_a_call(model, mode, caplog, change, said):
    change(model)
    pylate_fastmaxsim.enable(padding_free="always")
    batch = batch_of(model)
    assert assert_deciding_changes_nothing(model, batch[1:]) == "padded"
    assert f"with padding, as stock PyLate does: {said}" in caplog.text
    model.eval()
    assert assert_deciding_changes_nothing(model, batch[1:]) == mode
    assert_encodes_as_stock(model, batch)
    if change is _add_norm:  # behind an encoder that is not in training
        model[1].train()
        assert assert_deciding_changes_nothing(model, batch[1:]) == "padded"


@pytest.mark.parametrize(
    "change, loss_class",
    [(_add_noise, losses.Contrastive), (_add_norm, partial(losses.CachedContrastive, mini_batch_size=2))],
)
def test_the_losses_of_what_depends_on_all_tokens_of_a_call(model, mode, change, loss_class):
    loss_function = loss_class(model)
    with pylate_fastmaxsim.enabled(stock_masking=True):
        run(loss_function, batch_of(model, collate=features))
        assert mode_of(model) == {mode}
    change(model)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}

    def trained():
        torch.manual_seed(0)
        for name, buffer in buffers.items():
            model.get_buffer(name).copy_(buffer)
        result = run(loss_function, batch_of(model, collate=features))
        return result, {name: buffer.clone() for name, buffer in model.named_buffers()}

    stock, stock_buffers = trained()
    pylate_fastmaxsim.enable(stock_masking=True)
    ours, our_buffers = trained()
    assert_equal(ours, stock)
    torch.testing.assert_close(our_buffers, stock_buffers)


def test_an_encoder_that_quantises_by_all_tokens_of_a_call(encoder, mode, caplog):
    model = load_model(encoder("ibert", quant_mode=True)).double()
    pylate_fastmaxsim.enable()
    assert assert_deciding_changes_nothing(model, batch_of(model)[1:]) == "padded"
    assert "with padding, as stock PyLate does: IBertModel updates its buffers in each call" in caplog.text
    assert_encodes_as_stock(model.eval(), batch_of(model))


@pytest.mark.parametrize("loss_class", [losses.Contrastive, partial(losses.CachedContrastive, mini_batch_size=2)])
def test_all_weights_have_gradients_under_autocast(encoder, mode, loss_class):
    """Up to PyTorch 2.10 autocast keeps weights cast without gradients, as a trial does, for who needs some."""
    model = load_model(encoder("modernbert"))
    loss_function, batch = loss_class(model), batch_of(model)
    pylate_fastmaxsim.enable()
    for _ in range(2):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_function([dict(column) for column in batch])
            if loss_class is not losses.Contrastive:  # its second pass
                loss.backward()
        if loss_class is losses.Contrastive:
            loss.backward()
        assert [name for name, weight in model.named_parameters() if weight.grad is None] == []


def test_outputs_of_layers_come_once_each_after_the_trial(encoder, mode):
    def earlier(_head, args):
        args[0]["token_embeddings"] = args[0]["all_layer_embeddings"][-2]

    def step():
        model = load_model(encoder("bert")).double()
        model[0].auto_model.config.output_hidden_states = True
        model[1].register_forward_pre_hook(earlier)
        return model, run(losses.Contrastive(model), batch_of(model, collate=features))

    _, stock = step()
    pylate_fastmaxsim.enable(stock_masking=True, padding_free="always")
    model, ours = step()
    assert_equal(ours, stock)
    assert mode_of(model) == {mode}
