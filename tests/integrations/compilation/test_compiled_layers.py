"""`enable(compile=True)`: compiled layers do what they do uncompiled, whatever hooks they have, whoever calls them."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from compared import assert_equal, batch_of, run
from models import features, load_model
from pylate import losses
from torch import nn

import pylate_fastmaxsim
from pylate_fastmaxsim.integrations.compilation.layers import encoder_layers

pytestmark = pytest.mark.compile


@pytest.fixture(autouse=True)
def backend(request, monkeypatch):
    """Graphs as they were traced, unless a test says otherwise: what is tested is decided before they are compiled."""
    name = getattr(request, "param", "eager")
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=name))
    torch._dynamo.reset()


def half(_module, _args, output):
    return output / 2


def last_linear(layer):
    return [module for module in layer.modules() if isinstance(module, nn.Linear)][-1]


@pytest.mark.parametrize(
    ("family", "place", "before", "checkpointed"), [("bert", 0, False, False), ("modernbert", -1, True, True)]
)
def test_hooks_inside_of_one_layer(encoder, family, place, before, checkpointed):
    model = load_model(encoder(family, num_hidden_layers=4)).double()
    loss_function, batch = losses.Contrastive(model), batch_of(model)
    plain = run(loss_function, batch)
    layer = last_linear(encoder_layers(model)[place])
    hook = layer.register_forward_hook(half)
    expected = run(loss_function, batch)
    assert expected[0] != plain[0]
    if checkpointed:
        model[0].auto_model.gradient_checkpointing_enable({"use_reentrant": False})
    if not before:
        hook.remove()
    with pylate_fastmaxsim.enabled(compile=True, stock_masking=True):
        first = run(loss_function, batch)
        if not before:
            assert_equal(first, plain)
            layer.register_forward_hook(half)
        for _ in range(2):
            assert_equal(run(loss_function, batch), expected)


# Which weights a backward is for is fixed where a graph is divided into forward and backward.
@pytest.mark.parametrize("backend", ["aot_eager"], indirect=True)
@pytest.mark.parametrize(("frozen_first", "checkpointed"), [(True, False), (False, True)])
def test_weights_that_are_frozen_for_a_time(encoder, frozen_first, checkpointed):
    model = load_model(encoder("modernbert")).double()
    if checkpointed:
        model[0].auto_model.gradient_checkpointing_enable({"use_reentrant": False})
    loss_function, batch = losses.Contrastive(model), batch_of(model)
    # Their input, which is looked at in each call, is trained throughout.
    layers = nn.ModuleList(encoder_layers(model))
    layers.requires_grad_(not frozen_first)
    expected = [run(loss_function, batch)]
    layers.requires_grad_(frozen_first)
    expected.append(run(loss_function, batch))
    with pylate_fastmaxsim.enabled(compile=True, stock_masking=True):
        for frozen in (frozen_first, not frozen_first, frozen_first):
            layers.requires_grad_(not frozen)
            for _ in range(2):
                assert_equal(run(loss_function, batch), expected[frozen != frozen_first])


@pytest.mark.parametrize(("family", "checkpointed"), [("modernbert", True), ("qwen3", False)])
def test_outputs_of_layers_are_collected(encoder, caplog, family, checkpointed):
    model = load_model(encoder(family)).double().train()
    if checkpointed:
        model[0].auto_model.gradient_checkpointing_enable({"use_reentrant": False})
    inputs = {key: value for key, value in features(model, ["a query"])[0].items() if key != "token_type_ids"}

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
    layers = encoder_layers(model)
    pylate_fastmaxsim.enable(compile=True)
    run(losses.Contrastive(model), batch_of(model))
    assert all(layer._compiled_call_impl is not None for layer in layers)
    run(losses.Contrastive(nn.DataParallel(model)), batch_of(model))
    assert all(layer._compiled_call_impl is None for layer in layers)
    assert "compile=True does nothing: DataParallel copies the layers" in caplog.text


def test_settings_of_the_compiler_that_a_user_changes_stay(model):
    config = torch._dynamo.config
    before = config.recompile_limit, config.skip_nnmodule_hook_guards
    try:
        with pylate_fastmaxsim.enabled(compile=True):
            run(losses.Contrastive(model), batch_of(model))
            config.recompile_limit = 200
        assert (config.recompile_limit, config.skip_nnmodule_hook_guards) == (200, before[1])
    finally:
        config.recompile_limit = before[0]
    with pylate_fastmaxsim.enabled(compile=True):
        run(losses.Contrastive(model), batch_of(model))
        assert (config.recompile_limit, config.skip_nnmodule_hook_guards) != before
    assert (config.recompile_limit, config.skip_nnmodule_hook_guards) == before


def test_layers_in_a_list_of_blocks():
    """As Funnel has them. Nothing calls a list, so that compiling one would do nothing."""
    layers = [nn.Linear(1, 1) for _ in range(3)]
    blocks = nn.ModuleList([nn.ModuleList(layers[:1]), nn.ModuleList(layers[1:])])
    assert encoder_layers(nn.ModuleDict({"blocks": blocks})) == layers
