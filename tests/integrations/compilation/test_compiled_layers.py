"""`enable(compile=True)`: compiled layers do what they do uncompiled, whatever hooks they have, whoever calls them."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from peft import LoraConfig
from pylate import losses
from torch import nn
from transformers.models.modernbert.modeling_modernbert import ModernBertEncoderLayer, ModernBertMLP

import pylate_fastmaxsim
from pylate_fastmaxsim.integrations.compilation import layers as compilation_layers
from pylate_fastmaxsim.integrations.compilation.layers import encoder_layers
from tests.support.compared import assert_equal, batch_of, run
from tests.support.models import features, load_model

pytestmark = pytest.mark.compile


# Graphs as they were traced, unless a test says otherwise: what is tested is decided before they are compiled.
def compiled_as(backend: str):
    return pytest.mark.parametrize("backend", [backend], indirect=True)


def is_compiled(module: nn.Module) -> bool:
    # What PyTorch's own compile() sets.
    return module._compiled_call_impl is not None


def half(_module, _args, output):
    return output / 2


def hooked(model):
    encoder_layers(model)[0].mlp.Wi.register_forward_hook(half)
    encoder_layers(model)[1].attn_norm.register_forward_hook(half)


def with_adapter(model):
    model[0].auto_model.add_adapter(LoraConfig(target_modules=["Wi"], init_lora_weights=False))


def forked(model):
    class Halved(ModernBertMLP):
        def forward(self, hidden_states):
            return super().forward(hidden_states) / 2

    for layer in encoder_layers(model):
        layer.mlp.__class__ = Halved


def subclassed(model):
    class Layer(ModernBertEncoderLayer):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs) / 2

    for layer in encoder_layers(model):
        layer.__class__ = Layer


def with_forwards_of_their_own(model):
    for layer in encoder_layers(model):
        layer.mlp.forward = partial(lambda stock, states: stock(states) / 2, layer.mlp.forward)


def other_activation(model):
    for layer in encoder_layers(model):
        layer.mlp.act = nn.GELU(approximate="tanh")


def without_the_second(model):
    core = model[0].auto_model
    core.layers = nn.ModuleList(layer for number, layer in enumerate(core.layers) if number != 1)


def doubled_before_the_second(model):
    encoder_layers(model)[1].register_forward_pre_hook(lambda _module, args: (args[0] * 2, *args[1:]))


def second_checkpointed(model):
    model[0].auto_model.gradient_checkpointing_enable({"use_reentrant": False})
    for number, layer in enumerate(encoder_layers(model)):
        layer.gradient_checkpointing = number == 1


def frozen_but_for_a_norm(model):
    for name, weight in model[0].auto_model.named_parameters():
        weight.requires_grad = name.startswith("layers.1.attn_norm")


# Layers that are not stock's run as they are, and what changes between layers counts.
NOT_STOCK = [hooked, with_adapter, forked, subclassed, with_forwards_of_their_own, other_activation]
BETWEEN = [without_the_second, doubled_before_the_second, second_checkpointed, frozen_but_for_a_norm]


@pytest.mark.parametrize("change", [*NOT_STOCK, *BETWEEN])
def test_changes_of_layers(encoder, used, change):
    model = load_model(encoder("modernbert", num_hidden_layers=2 if change in NOT_STOCK else 4)).double()
    loss_function, batch = losses.Contrastive(model), batch_of(model)
    plain = run(loss_function, batch)
    with pylate_fastmaxsim.enabled(compile=True, stock_masking=True):
        if change in BETWEEN:
            run(loss_function, batch)
        change(model)
        if change in NOT_STOCK:
            compilation_layers.compile_layers(model)
        ours = run(loss_function, batch)
    expected = run(loss_function, batch)
    assert_equal(ours, expected)
    if change in NOT_STOCK:
        assert expected[0] != plain[0] and not used


# Which weights a backward is for is fixed where a graph is divided into forward and backward.
@compiled_as("aot_eager")
@pytest.mark.parametrize("what", ["hooks", "weights"])
def test_changes_that_come_and_go(encoder, what):
    model = load_model(encoder("modernbert")).double()
    if what == "hooks":
        model[0].auto_model.gradient_checkpointing_enable({"use_reentrant": False})
    loss_function, batch = losses.Contrastive(model), batch_of(model)
    # Their input, which is looked at in each call, is trained throughout.
    layers, handles = nn.ModuleList(encoder_layers(model)), []
    inner = [module for module in layers[-1].modules() if isinstance(module, nn.Linear)][-1]

    def change(on: bool) -> None:
        if what == "weights":
            layers.requires_grad_(not on)
        elif on:
            handles.append(inner.register_forward_hook(half))
        elif handles:
            handles.pop().remove()

    expected = {}
    for on in (True, False):
        change(on)
        expected[on] = run(loss_function, batch)
    with pylate_fastmaxsim.enabled(compile=True, stock_masking=True):
        for on in (True, False, True):
            change(on)
            for _ in range(2):
                assert_equal(run(loss_function, batch), expected[on])
    with pytest.raises((AssertionError, KeyError)):
        assert_equal(expected[True], expected[False])


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
        assert is_compiled(encoder_layers(model)[0])
        torch.testing.assert_close(step(), expected)
        assert "Layers are not compiled any more" in caplog.text
        for _ in range(2):
            assert_equal(run(losses.Contrastive(model), batch_of(model)), stock)
    assert len(expected[0]) > 2


def test_copies_of_data_parallel_are_not_compiled(model, caplog):
    pylate_fastmaxsim.enable(compile=True)
    for wrapped in (model, nn.DataParallel(model)):
        run(losses.Contrastive(wrapped), batch_of(model))
        assert all(is_compiled(layer) == (wrapped is model) for layer in encoder_layers(model))
    assert "compile=True does nothing: DataParallel copies the layers" in caplog.text


def test_a_layer_that_the_user_compiled_stays_as_it_is(model):
    first, second = encoder_layers(model)
    second.compile()
    own = second._compiled_call_impl
    for on in (True, False):
        with pylate_fastmaxsim.enabled(compile=on):
            run(losses.Contrastive(model), batch_of(model))
            assert second._compiled_call_impl is own and is_compiled(first) == on


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
