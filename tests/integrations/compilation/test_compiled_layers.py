"""`enable(compile=True)`: compiled layers do what they do uncompiled, whatever hooks they have, whoever calls them."""

from functools import partial

import pytest
import torch
from pylate import losses
from torch import nn

import pylate_fastmaxsim
from pylate_fastmaxsim.integrations.compilation.layers import encoder_layers
from tests.support.compared import assert_equal, batch_of, run
from tests.support.models import features, load_model

pytestmark = pytest.mark.compile


@pytest.fixture(autouse=True)
def backend(request, monkeypatch):
    """Graphs as they were traced, unless a test says otherwise: what is tested is decided before they are compiled."""
    name = getattr(request, "param", "eager")
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=name))
    torch._dynamo.reset()


def half(_module, _args, output):
    return output / 2


def test_hooks_inside_of_one_layer(encoder):
    model = load_model(encoder("modernbert", num_hidden_layers=4)).double()
    model[0].auto_model.gradient_checkpointing_enable({"use_reentrant": False})
    loss_function, batch = losses.Contrastive(model), batch_of(model)
    plain = run(loss_function, batch)
    inner = [module for module in encoder_layers(model)[-1].modules() if isinstance(module, nn.Linear)][-1]
    hook = inner.register_forward_hook(half)
    hooked = run(loss_function, batch)
    assert hooked[0] != plain[0]
    with pylate_fastmaxsim.enabled(compile=True, stock_masking=True):
        for expected in (hooked, plain, hooked):
            for _ in range(2):
                assert_equal(run(loss_function, batch), expected)
            if expected is hooked:
                hook.remove()
            else:
                hook = inner.register_forward_hook(half)


# Which weights a backward is for is fixed where a graph is divided into forward and backward.
@pytest.mark.parametrize("backend", ["aot_eager"], indirect=True)
def test_weights_that_are_frozen_for_a_time(encoder):
    model = load_model(encoder("bert")).double()
    loss_function, batch = losses.Contrastive(model), batch_of(model)
    # Their input, which is looked at in each call, is trained throughout.
    layers = nn.ModuleList(encoder_layers(model))
    expected = {}
    for trained in (True, False):
        layers.requires_grad_(trained)
        expected[trained] = run(loss_function, batch)
    with pylate_fastmaxsim.enabled(compile=True, stock_masking=True):
        for trained in (False, True, False):
            layers.requires_grad_(trained)
            for _ in range(2):
                assert_equal(run(loss_function, batch), expected[trained])


def test_outputs_of_layers_are_collected(encoder, caplog):
    model = load_model(encoder("modernbert")).double().train()
    model[0].auto_model.gradient_checkpointing_enable({"use_reentrant": False})
    inputs = features(model, ["a query"])[0]

    def step():
        model.zero_grad()
        states = model[0].auto_model(**inputs, output_hidden_states=True).hidden_states
        sum(state.square().mean() for state in states).backward()
        return states, [weight.grad for weight in model[0].parameters() if weight.grad is not None]

    expected, stock = step(), run(losses.Contrastive(model), batch_of(model))
    with pylate_fastmaxsim.enabled(compile=True, stock_masking=True):
        run(losses.Contrastive(model), batch_of(model))
        assert encoder_layers(model)[0]._compiled_call_impl is not None
        torch.testing.assert_close(step(), expected)
        assert "Layers are not compiled any more" in caplog.text
        for _ in range(2):
            assert_equal(run(losses.Contrastive(model), batch_of(model)), stock)
    assert len(expected[0]) > 2


def test_copies_of_data_parallel_are_not_compiled(model, caplog):
    pylate_fastmaxsim.enable(compile=True)
    for wrapped in (model, nn.DataParallel(model)):
        run(losses.Contrastive(wrapped), batch_of(model))
        assert all((layer._compiled_call_impl is None) == (wrapped is not model) for layer in encoder_layers(model))
    assert "compile=True does nothing: DataParallel copies the layers" in caplog.text


def test_settings_of_the_compiler_that_a_user_changes_stay(model):
    config = torch._dynamo.config
    before = config.recompile_limit, config.skip_nnmodule_hook_guards
    try:
        for limit in (None, 200):
            with pylate_fastmaxsim.enabled(compile=True):
                run(losses.Contrastive(model), batch_of(model))
                assert (config.recompile_limit, config.skip_nnmodule_hook_guards) != before
                if limit:
                    config.recompile_limit = limit
            assert (config.recompile_limit, config.skip_nnmodule_hook_guards) == (limit or before[0], before[1])
    finally:
        config.recompile_limit = before[0]


def test_layers_in_a_list_of_blocks():
    """As Funnel has them. Nothing calls a list, so that compiling one would do nothing."""
    layers = [nn.Linear(1, 1) for _ in range(3)]
    blocks = nn.ModuleList([nn.ModuleList(layers[:1]), nn.ModuleList(layers[1:])])
    assert encoder_layers(nn.ModuleDict({"blocks": blocks})) == layers
