"""Gradient checkpointing and `enable(compile=True)`: what is compiled holds the checkpoint, where that is safe."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from models import collated, load_model, sentences
from pylate import losses
from torch._dynamo.backends.registry import lookup_backend
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

import pylate_fastmaxsim

STOCK = GradientCheckpointingLayer.__call__


@pytest.fixture
def checkpoints(monkeypatch) -> list[bool]:
    """Of each graph that is compiled, whether a checkpoint is in it."""
    seen: list[bool] = []
    compile_function = torch.compile

    def backend(graph, inputs):
        seen.append(any("checkpoint" in str(node.target) for node in graph.graph.nodes))
        return lookup_backend("aot_eager")(graph, inputs)

    monkeypatch.setattr(torch, "compile", partial(compile_function, backend=backend))
    torch._dynamo.reset()
    return seen


def batch_of(model, seed: int = 0, documents: int = 6):
    return collated(model, *(sentences(documents, seed=seed + column) for column in range(3)))


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


def checkpointed(model, reentrant: bool = False) -> None:
    model[0].auto_model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model[0].auto_model.enable_input_require_grads()


@pytest.mark.parametrize(("family", "reentrant"), [("modernbert", False), ("bert", True)])
def test_checkpoints_are_compiled_with_their_layers(encoder, mode, checkpoints, family, reentrant):
    model = load_model(encoder(family, num_hidden_layers=4))
    batches = [batch_of(model, seed, count) for seed, count in enumerate((6, 6, 9, 5))]
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


def dropout_that_is_switched_on(model) -> None:
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.1


def attention_dropout(model) -> None:
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.1


def hook(model) -> None:
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.register_forward_hook(lambda *_: None)


def somebodys_own(model) -> None:
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module._gradient_checkpointing_func = lambda function, *args: checkpoint(
                function, *args, use_reentrant=False
            )


@pytest.mark.parametrize("change", [dropout_that_is_switched_on, attention_dropout, hook, somebodys_own])
def test_left_to_transformers(encoder, checkpoints, change):
    model = load_model(encoder("modernbert")).train()
    batch = batch_of(model)
    checkpointed(model)
    with pylate_fastmaxsim.enabled(compile=True):
        step(model, batch)
        assert any(checkpoints)
        change(model)
        checkpoints.clear()
        ours, _ = step(model, batch)
        assert checkpoints and not any(checkpoints)
    with pylate_fastmaxsim.enabled():
        torch.testing.assert_close(ours, step(model, batch)[0], atol=1e-5, rtol=1e-4)


def test_a_model_that_is_evaluated_does_not_checkpoint(encoder, checkpoints):
    model = load_model(encoder("modernbert")).eval()
    checkpointed(model)
    with pylate_fastmaxsim.enabled(compile=True):
        step(model, batch_of(model))
    assert checkpoints and not any(checkpoints)
