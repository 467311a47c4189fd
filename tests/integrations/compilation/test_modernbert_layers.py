"""Compiled layers of ModernBERT in fewer passes: they compute what stock layers do, and what is not stock runs as it is."""

from functools import partial

import pytest
import torch
from peft import LoraConfig
from pylate import losses
from torch import nn
from transformers.models.modernbert.modeling_modernbert import ModernBertEncoderLayer, ModernBertMLP

import pylate_fastmaxsim
from pylate_fastmaxsim.integrations.compilation import layers as compilation_layers
from pylate_fastmaxsim.integrations.compilation import modernbert
from pylate_fastmaxsim.integrations.compilation.layers import encoder_layers
from tests.support.compared import assert_equal, batch_of, run
from tests.support.models import collated, load_model, sentences

pytestmark = pytest.mark.compile

STOCK = ModernBertEncoderLayer.forward


@pytest.fixture(autouse=True)
def backend(request, monkeypatch):
    name = getattr(request, "param", "eager")
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=name))
    torch._dynamo.reset()


@pytest.fixture
def used(monkeypatch) -> list[str]:
    """The operators in layers, as they are traced."""
    seen: list[str] = []

    # Run while a layer is traced, and not looked at again: with a guard on a list each call would be traced.
    @torch.compiler.assume_constant_result
    def note(name: str) -> None:
        seen.append(name)

    def noting(name, operator):
        def noted(*args, **kwargs):
            note(name)
            return operator(*args, **kwargs)

        return noted

    for name in ("geglu_linear", "norm_with_residual", "rotary_self_attention"):
        monkeypatch.setattr(modernbert, name, noting(name, getattr(modernbert, name)))
    return seen


@pytest.fixture
def fast_attention(monkeypatch, packed):
    """Texts without padding, attended to by `rotary_self_attention`, as on a GPU that has its kernels."""
    monkeypatch.setattr(modernbert, "rotary_is_faster", lambda *_: True)


@pytest.mark.parametrize("is_query", [False, True])
def test_encode_without_compiling(encoder, fast_attention, used, is_query):
    model = load_model(encoder("modernbert", local_attention=24)).double()
    texts = [*sentences(5, 12), "", "one"]
    expected = model.encode(texts, is_query=is_query)
    with pylate_fastmaxsim.enabled():
        found = model.encode(texts, is_query=is_query)
        said = str(pylate_fastmaxsim.status())
    # What the check on the first batch finds wrong is encoded with padding.
    assert "are packed" in said and "a call of their own" not in said
    assert {"geglu_linear", "rotary_self_attention"} <= set(used)
    for own, stock in zip(found, expected, strict=True):
        torch.testing.assert_close(own, stock, atol=1e-6, rtol=1e-6)


def _as_subclass(model):
    """Its layers run stock code from now on, which gives the same and is known to leave no padding in."""
    for layer in encoder_layers(model):
        layer.mlp.__class__ = type("MLP", (ModernBertMLP,), {"__module__": "torch"})


IN_LAYERS = {"geglu_linear", "norm_with_residual"}


@pytest.mark.parametrize("backend", ["aot_eager"], indirect=True)
def test_losses_and_gradients(encoder, packed, used):
    model = load_model(encoder("modernbert", mlp_bias=True, norm_bias=True)).double()
    loss_function, batches = losses.Contrastive(model), [batch_of(model, seed=seed) for seed in range(2)]
    expected = [run(loss_function, batch) for batch in batches]
    with pylate_fastmaxsim.enabled(compile=True, stock_masking=True):
        for batch, stock in zip(batches, expected, strict=True):
            assert_equal(run(loss_function, batch), stock)
        assert set(used) == IN_LAYERS
        assert ModernBertEncoderLayer.forward is not STOCK
    assert ModernBertEncoderLayer.forward is STOCK


@pytest.mark.parametrize("backend", ["aot_eager"], indirect=True)
def test_attention_with_the_projection(encoder, fast_attention, used):
    """Queries have tokens of expansion, which are not attended to. Stock turns queries and keys in float32."""
    model = load_model(encoder("modernbert", attention_bias=True, local_attention=24)).double()
    loss_function = losses.Contrastive(model)
    batch = collated(model, sentences(6, longest=8), sentences(6, seed=1))
    expected = run(loss_function, batch)
    with pylate_fastmaxsim.enabled(compile=True, stock_masking=True):
        assert_equal(run(loss_function, batch), expected, 1e-5)
    assert set(used) == {*IN_LAYERS, "rotary_self_attention"}


def test_autocast_rounds_as_stock(encoder, packed, used):
    model = load_model(encoder("modernbert", local_attention=24))
    loss_function, batch = losses.Contrastive(model), batch_of(model)
    results = []
    for known in (True, False):
        torch._dynamo.reset()
        with pylate_fastmaxsim.enabled(compile=True):
            if not known:
                _as_subclass(model)
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_function([dict(column) for column in batch])
            model.zero_grad()
            loss.backward()
        results.append((loss.detach(), {name: weight.grad for name, weight in model.named_parameters()}))
        assert set(used) == IN_LAYERS
    assert all(gradient.dtype == torch.float32 for gradient in results[0][1].values())
    assert results[0][0] == results[1][0]
    # The gradient of the residual stream is rounded elsewhere.
    assert_equal(*results, 2e-2)


def _hooked(model):
    encoder_layers(model)[0].mlp.Wi.register_forward_hook(lambda _module, _args, output: output / 2)
    encoder_layers(model)[1].attn_norm.register_forward_hook(lambda _module, _args, output: output / 2)


def _with_adapter(model):
    model[0].auto_model.add_adapter(LoraConfig(target_modules=["Wi"], init_lora_weights=False))


def _forked(model):
    class Halved(ModernBertMLP):
        def forward(self, hidden_states):
            return super().forward(hidden_states) / 2

    for layer in encoder_layers(model):
        layer.mlp.__class__ = Halved


def _subclassed(model):
    class Layer(ModernBertEncoderLayer):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs) / 2

    for layer in encoder_layers(model):
        layer.__class__ = Layer


def _other_activation(model):
    for layer in encoder_layers(model):
        layer.mlp.act.act = partial(nn.functional.gelu, approximate="tanh")


CHANGES = _hooked, _with_adapter, _forked, _subclassed, _other_activation


@pytest.mark.parametrize("change", CHANGES, ids=[change.__name__ for change in CHANGES])
def test_what_is_not_stock_runs_as_it_is(encoder, used, change):
    model = load_model(encoder("modernbert")).double()
    plain = run(losses.Contrastive(model), batch_of(model))
    change(model)
    loss_function, batch = losses.Contrastive(model), batch_of(model)
    expected = run(loss_function, batch)
    assert expected[0] != plain[0]
    with pylate_fastmaxsim.enabled(compile=True, stock_masking=True):
        compilation_layers.compile_layers(model)
        assert_equal(run(loss_function, batch), expected)
    assert not used


def test_a_hook_on_all_modules(encoder, used):
    model = load_model(encoder("modernbert")).double()
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        with pylate_fastmaxsim.enabled(compile=True, stock_masking=True):
            compilation_layers.compile_layers(model)
            run(losses.Contrastive(model), batch_of(model))
    finally:
        handle.remove()
    assert not used


def test_code_that_is_not_known(encoder, used, monkeypatch):
    monkeypatch.setattr(ModernBertMLP, "forward", lambda self, states: self.Wo(self.Wi(states).chunk(2, dim=-1)[0]))
    assert modernbert.patches() == []


def test_dropout_of_the_mlp(encoder, used):
    model = load_model(encoder("modernbert", mlp_dropout=0.3))
    loss_function, batch = losses.Contrastive(model), batch_of(model)
    with pylate_fastmaxsim.enabled(compile=True):
        torch.manual_seed(0)
        first = run(loss_function, batch)[0]
        torch.manual_seed(1)
        assert run(loss_function, batch)[0] != first
    assert set(used) == {"norm_with_residual"}


def test_layers_share_what_is_compiled(encoder, packed):
    """The first layer, those between and the last are traced, these twice for the window of packed documents."""
    model = load_model(encoder("modernbert", num_hidden_layers=6))
    norm = model[0].auto_model.final_norm
    torch._dynamo.utils.counters.clear()
    with pylate_fastmaxsim.enabled(compile=True):
        for seed in range(2):
            run(losses.Contrastive(model), batch_of(model, seed=seed))
        assert norm._compiled_call_impl is not None
    assert norm._compiled_call_impl is None
    queries, documents = 3, 4
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == queries + documents + 2


def test_layers_are_given_their_first_norms(encoder, used):
    model = load_model(encoder("modernbert", num_hidden_layers=3))
    with pylate_fastmaxsim.enabled(compile=True):
        compilation_layers.compile_layers(model)
        model[0].auto_model(torch.tensor([[5, 6, 7]]))
    # One in each layer, and one of each of the two that follow another.
    assert used.count("norm_with_residual") == 5


def test_a_layer_that_the_user_compiled_stays_as_it_is(encoder):
    model = load_model(encoder("modernbert"))
    first, second = encoder_layers(model)
    second.compile()
    own = second._compiled_call_impl
    with pylate_fastmaxsim.enabled(compile=True):
        compilation_layers.compile_layers(model)
        assert second._compiled_call_impl is own and first._compiled_call_impl is not None
    assert second._compiled_call_impl is own and first._compiled_call_impl is None


def _doubled_before_the_second(encoder):
    encoder.layers[1].register_forward_pre_hook(lambda _module, args: (args[0] * 2, *args[1:]))


def _frozen_but_for_a_norm(encoder):
    for name, weight in encoder.named_parameters():
        weight.requires_grad = name.startswith("layers.1.attn_norm")


BETWEEN = _doubled_before_the_second, _frozen_but_for_a_norm


@pytest.mark.parametrize("change", BETWEEN, ids=[change.__name__ for change in BETWEEN])
def test_what_changes_between_layers(encoder, change):
    model = load_model(encoder("modernbert", num_hidden_layers=4)).double()
    loss_function, batch = losses.Contrastive(model), batch_of(model)
    with pylate_fastmaxsim.enabled(compile=True, stock_masking=True):
        run(loss_function, batch)
        change(model[0].auto_model)
        ours = run(loss_function, batch)
    assert_equal(ours, run(loss_function, batch))
