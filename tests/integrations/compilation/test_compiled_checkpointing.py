"""Gradient checkpointing and `enable(compile=True)`: what is compiled holds the checkpoint, where that is safe."""

from functools import partial

import pytest
import torch
from peft import LoraConfig
from pylate import losses
from torch._dynamo.backends.registry import lookup_backend
from transformers.modeling_layers import GradientCheckpointingLayer

import pylate_fastmaxsim
from pylate_fastmaxsim.integrations.compilation import modernbert
from pylate_fastmaxsim.integrations.compilation.layers import encoder_layers
from tests.support.encoded import batch_of
from tests.support.models import checkpointed, load_model

pytestmark = pytest.mark.compile

STOCK = GradientCheckpointingLayer.__call__


@pytest.fixture
def checkpoints(request, monkeypatch) -> list[bool]:
    compiler = lookup_backend(getattr(request, "param", "eager"))
    seen: list[bool] = []
    compile_function = torch.compile

    def backend(graph, inputs):
        seen.append(any("checkpoint" in str(node.target) for node in graph.graph.nodes))
        return compiler(graph, inputs)

    monkeypatch.setattr(torch, "compile", partial(compile_function, backend=backend))
    torch._dynamo.reset()
    return seen


def step(model, batch) -> tuple[torch.Tensor, int]:
    """Gradients of all weights, and the bytes beside the weights that were kept for the backward."""
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    model.zero_grad()
    torch.manual_seed(0)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = losses.Contrastive(model)(batch)
    loss.backward()
    gradients = [weight.grad.flatten() for weight in model.parameters() if weight.grad is not None]
    return torch.cat(gradients), sum(kept.values())


@pytest.mark.parametrize("checkpoints", ["aot_eager"], indirect=True)
@pytest.mark.parametrize("family, reentrant", [("modernbert", False), ("bert", True)])
def test_checkpoints_are_compiled_with_their_layers(encoder, packed, checkpoints, monkeypatch, family, reentrant):
    monkeypatch.setattr(modernbert, "rotary_is_faster", lambda *_: True)
    model = load_model(encoder(family, num_hidden_layers=2))
    batches = [batch_of(model, seed=seed, queries=count) for seed, count in enumerate((6, 6, 9, 5))]
    expected = [step(model, batch)[0] for batch in batches]
    with pylate_fastmaxsim.enabled(compile=True, stock_masking=True):
        _, kept_without = step(model, batches[0])
        assert checkpoints and not any(checkpoints)
        checkpoints.clear()
        checkpointed(model, reentrant)
        ours, kept = zip(*(step(model, batch) for batch in batches[:2]), strict=True)
        assert checkpoints and all(checkpoints)
        checkpoints.clear()
        ours += tuple(step(model, batch)[0] for batch in batches[2:])
        assert not checkpoints, "compiled again as batches vary"
    assert kept[0] < 0.7 * kept_without
    for own, stock in zip(ours, expected, strict=True):
        torch.testing.assert_close(own, stock, atol=1e-5, rtol=1e-4)
    assert GradientCheckpointingLayer.__call__ is STOCK


def test_an_adapter_with_dropout_added_afterwards(encoder, checkpoints):
    model = load_model(encoder("bert"))
    checkpointed(model)
    with pylate_fastmaxsim.enabled(compile=True, stock_masking=True):
        step(model, batch_of(model))
        assert all(checkpoints)
        model[0].auto_model.add_adapter(LoraConfig(target_modules=["query", "value"], lora_dropout=0.5))
        checkpoints.clear()
        step(model, batch_of(model))
        assert checkpoints and not any(checkpoints)


@pytest.mark.parametrize("checkpoints", ["aot_eager"], indirect=True)
def test_the_backward_runs_layers_that_were_compiled_in_between_as_the_forward_did(encoder, checkpoints):
    model = load_model(encoder("bert"))
    checkpointed(model)
    batch, contrastive = batch_of(model), losses.Contrastive(model)

    def gradients() -> torch.Tensor:
        model.zero_grad()
        others = model({name: batch[1][name] for name in ("input_ids", "attention_mask")})["token_embeddings"]
        (others.square().mean() + contrastive(batch)).backward()
        return torch.cat([weight.grad.flatten() for weight in model.parameters() if weight.grad is not None])

    expected = gradients()
    with pylate_fastmaxsim.enabled(compile=True, stock_masking=True):
        for _ in range(2):
            torch.testing.assert_close(gradients(), expected, atol=1e-5, rtol=1e-4)
    assert any(checkpoints)


def hidden_dropout(model, patched) -> None:
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            patched.setattr(module, "p", 0.1)


def attention_dropout(model, patched) -> None:
    for layer in encoder_layers(model):
        patched.setattr(layer.attn, "attention_dropout", 0.1)


def hook(model, patched) -> None:
    for layer in encoder_layers(model):
        patched.setitem(layer._forward_hooks, 0, lambda *_: None)


def test_left_to_transformers(encoder, checkpoints, monkeypatch):
    model = load_model(encoder("modernbert")).train()
    batch = batch_of(model)
    checkpointed(model)
    layer = encoder_layers(model)[0]
    for change in (hidden_dropout, attention_dropout, hook):
        by_themselves = []
        with pylate_fastmaxsim.enabled(compile=True), monkeypatch.context() as patched:
            step(model, batch)
            compiled = layer._compiled_call_impl
            patched.setattr(layer, "_compiled_call_impl", partial(_counted, by_themselves, compiled))
            step(model, batch)
            assert any(checkpoints) and not by_themselves
            change(model, patched)
            ours, _ = step(model, batch)
            assert by_themselves, change
        with pylate_fastmaxsim.enabled(), monkeypatch.context() as patched:
            change(model, patched)
            torch.testing.assert_close(ours, step(model, batch)[0], atol=1e-5, rtol=1e-4, msg=str(change))


def _counted(calls, function, *args, **kwargs):
    if not torch.compiler.is_compiling():
        calls.append(None)
    return function(*args, **kwargs)
