"""Compiled layers of ModernBERT in fewer passes: they compute what stock layers do.

What is not stock's in a layer is in test_compiled_layers.py.
"""

from __future__ import annotations

import pytest
import torch
from pylate import losses
from torch import nn
from torch._dynamo.backends.registry import lookup_backend
from transformers.models.modernbert import modeling_modernbert as host

import pylate_fastmaxsim
from pylate_fastmaxsim.integrations.compilation import layers as compilation_layers
from pylate_fastmaxsim.integrations.compilation import modernbert
from pylate_fastmaxsim.integrations.compilation.layers import encoder_layers
from tests.support.compared import assert_equal, batch_of, run
from tests.support.models import collated, load_model, sentences

pytestmark = pytest.mark.compile

STOCK = host.ModernBertEncoderLayer.forward
IN_LAYERS = {"geglu_linear", "norm_with_residual"}
WIDE = {"local_attention": 24}  # layers see all of a query, so that queries are encoded with packed documents


@pytest.fixture
def fast_attention(monkeypatch, packed):
    """Texts without padding, attended to by `rotary_self_attention`, as on a GPU that has its kernels."""
    monkeypatch.setattr(modernbert, "rotary_is_faster", lambda *_: True)


@pytest.fixture
def unknown(monkeypatch):
    """Call it for transformers to have a code that is not known, whose layers are compiled as they are."""
    stock = host.ModernBertMLP.forward
    return lambda: monkeypatch.setattr(host.ModernBertMLP, "forward", lambda self, states: stock(self, states))


@pytest.mark.parametrize("backend", ["aot_eager"], indirect=True)
def test_losses_and_gradients(encoder, packed, used):
    model = load_model(encoder("modernbert", mlp_bias=True, norm_bias=True)).double()
    loss_function, batches = losses.Contrastive(model), [batch_of(model, seed=seed) for seed in range(2)]
    expected = [run(loss_function, batch) for batch in batches]
    with pylate_fastmaxsim.enabled(compile=True, stock_masking=True):
        for batch, stock in zip(batches, expected, strict=True):
            assert_equal(run(loss_function, batch), stock)
        assert set(used) == IN_LAYERS
        assert host.ModernBertEncoderLayer.forward is not STOCK
    assert host.ModernBertEncoderLayer.forward is STOCK


@pytest.mark.parametrize("backend", ["aot_eager"], indirect=True)
def test_attention_with_the_projection(encoder, fast_attention, used):
    """Queries have tokens of expansion, which are not attended to. Stock turns queries and keys in float32."""
    model = load_model(encoder("modernbert", attention_bias=True, **WIDE)).double()
    loss_function = losses.Contrastive(model)
    batch = collated(model, sentences(6, longest=8), sentences(6, seed=1))
    expected = run(loss_function, batch)
    with pylate_fastmaxsim.enabled(compile=True, stock_masking=True):
        assert_equal(run(loss_function, batch), expected, 1e-5)
    assert set(used) == {*IN_LAYERS, "rotary_self_attention"}


def test_compiled_checkpoints_keep_no_more_than_stock(encoder, fast_attention, monkeypatch, unknown, used):
    model = load_model(encoder("modernbert", **WIDE)).double()
    model[0].auto_model.gradient_checkpointing_enable({"use_reentrant": False})
    loss_function, batch = losses.Contrastive(model), batch_of(model)
    weights = {weight.data_ptr() for weight in model.parameters()}
    compiler, found = lookup_backend("aot_eager"), set()

    def backend(graph, inputs):
        nodes = [node for module in graph.modules() if hasattr(module, "graph") for node in module.graph.nodes]
        found.update(str(node.target) for node in nodes)
        return compiler(graph, inputs)

    monkeypatch.setitem(torch.compile.keywords, "backend", backend)
    kept, results = [], []
    for known in (True, False):
        if not known:
            unknown()
        found.clear(), used.clear(), torch._dynamo.reset()
        sizes = {}

        def keep(tensor, sizes=sizes):
            if tensor.data_ptr() not in weights:
                sizes[tensor.data_ptr()] = tensor.nbytes
            return tensor

        with pylate_fastmaxsim.enabled(compile=True, stock_masking=True):
            results.append(run(loss_function, batch))
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                loss_function([dict(column) for column in batch])
        assert "tag_activation_checkpoint" in found
        assert set(used) == ({"geglu_linear", "rotary_self_attention"} if known else set())
        kept.append(sum(sizes.values()))
    assert_equal(results[0], results[1], 1e-5)
    assert kept[0] <= kept[1]


@pytest.mark.parametrize("backend", ["aot_eager"], indirect=True)
def test_autocast_rounds_as_stock(encoder, packed, used, unknown):
    model = load_model(encoder("modernbert", **WIDE))
    loss_function, batch, results = losses.Contrastive(model), batch_of(model), []
    for known in (True, False):
        if not known:
            unknown()
            used.clear()
        torch._dynamo.reset()
        with pylate_fastmaxsim.enabled(compile=True):
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_function([dict(column) for column in batch])
            model.zero_grad()
            loss.backward()
        results.append((loss.detach(), {name: weight.grad for name, weight in model.named_parameters()}))
        assert set(used) == (IN_LAYERS if known else set())
    assert all(gradient.dtype == torch.float32 for gradient in results[0][1].values())
    assert results[0][0] == results[1][0]
    # The gradient of the residual stream is rounded elsewhere.
    assert_equal(*results, 2e-2)


def test_a_hook_on_all_modules(model, used):
    seen = []
    handle = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(type(module).__name__))
    try:
        with pylate_fastmaxsim.enabled(compile=True, stock_masking=True):
            compilation_layers.compile_layers(model)
            run(losses.Contrastive(model), batch_of(model))
    finally:
        handle.remove()
    assert "ModernBertMLP" in seen and not used


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


def test_norms_between_layers_are_made_once(encoder, used):
    model = load_model(encoder("modernbert", num_hidden_layers=3))
    with pylate_fastmaxsim.enabled(compile=True):
        compilation_layers.compile_layers(model)
        model[0].auto_model(torch.tensor([[5, 6, 7]]))
    # The first layer has no norm of its own, and makes two with that of the second; the last makes its own one.
    assert used.count("norm_with_residual") == 2 + 2 + 1


def test_states_that_are_changed_in_place_between_layers(model):
    core = model[0].auto_model
    states = torch.randn(1, 8, core.config.hidden_size, dtype=torch.float64)
    positions = core.rotary_emb(states, torch.arange(8)[None], "full_attention")
    with pylate_fastmaxsim.enabled(compile=True):
        compilation_layers.compile_layers(model)
        first, second, *_ = core.layers
        states = first(states, position_embeddings=positions)
        states.detach().mul_(2)
        ours = second(states, position_embeddings=positions)
    torch.testing.assert_close(ours, second(states, position_embeddings=positions))


def test_rotary_angles_are_computed_once_a_forward(encoder, monkeypatch):
    model = load_model(encoder("modernbert", num_hidden_layers=4)).double()
    loss_function, batches = losses.Contrastive(model), [batch_of(model, seed=seed) for seed in range(2)]
    expected = [run(loss_function, batch) for batch in batches]
    rotary = model[0].auto_model.rotary_emb
    stock, made = type(rotary).forward, []

    def forward(self, x, position_ids, layer_type=None):
        made.append(layer_type)
        return stock(self, x, position_ids, layer_type)

    monkeypatch.setattr(type(rotary), "forward", forward)
    with pylate_fastmaxsim.enabled(compile=True, stock_masking=True):
        for batch, stock_result in zip(batches, expected, strict=True):
            made.clear()
            assert_equal(run(loss_function, batch), stock_result)
            calls = len(made) / len(set(made))
            assert calls < len(encoder_layers(model)) and set(made) == {"full_attention", "sliding_attention"}
    assert rotary._compiled_call_impl is None
