"""The fused head in PyLate's losses: loss and gradients as in stock, or as with plain Dense where it does not apply."""

from contextlib import nullcontext
from functools import wraps
from types import MethodType

import pytest
import torch
from accelerate.utils import convert_outputs_to_fp32
from peft import LoraConfig, inject_adapter_in_model
from pylate import losses
from pylate.models import Dense
from torch import nn

import pylate_fastmaxsim
from pylate_fastmaxsim.integrations.models.wrappers import unwrap
from pylate_fastmaxsim.integrations.pylate import fused_head
from pylate_fastmaxsim.integrations.pylate import losses as pylate_losses
from tests.support.compared import assert_equal, batch_for, batch_of, distance, run
from tests.support.hosts import operators
from tests.support.models import load_model

LOSSES = [
    (losses.Contrastive, {}),
    (losses.CachedContrastive, {"mini_batch_size": 4, "score_mini_batch_size": 3}),
    (losses.Distillation, {}),
]


@pytest.fixture
def projected(monkeypatch):
    seen, project = [], fused_head.project_normalize

    def recording(*args):
        output = project(*args)
        seen.append(output.dtype)
        return output

    monkeypatch.setattr(fused_head, "project_normalize", recording)
    return seen


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.compile)])
def test_the_last_of_chained_dense_modules_is_fused_with_other_options(encoder, projected, traced, compiled):
    model = load_model(encoder("bert", num_hidden_layers=1)).double()
    model.append(Dense(16, 8, bias=True).double())
    loss_function, batch = losses.Contrastive(model), batch_of(model)
    stock = run(loss_function, batch)
    assert "2.linear.bias" in stock[1]
    with pylate_fastmaxsim.enabled(stock_masking=True, padding_free=compiled, compile=compiled):
        assert_equal(run(loss_function, batch), stock)
    assert projected


def _cut_short(features):
    return {**features, "token_embeddings": features["token_embeddings"][..., :8]}


def _cutting(module):
    forward = type(module).forward
    changed = {"forward": lambda self, *args, **kwargs: _cut_short(forward(self, *args, **kwargs))}
    module.__class__ = type("Cutting", (type(module),), changed)


def _replaced_forward(model):
    forward = model.forward
    model.forward = wraps(forward)(lambda *args, **kwargs: _cut_short(forward(*args, **kwargs)))


def _replaced_forward_in_mixed_precision(model):
    _replaced_forward(model)
    model.forward = convert_outputs_to_fp32(model.forward)


def _linear_forward(model):
    forward = model[-1].linear.forward
    model[-1].linear.forward = lambda hidden: forward(hidden) + 1


def _lora(model):
    inject_adapter_in_model(LoraConfig(r=4, target_modules=["linear"], init_lora_weights=False), model[-1])
    model.double().train()


_cut_after = torch.autocast("cpu", enabled=False)(lambda _module, _args, output: _cut_short(output))
_ACTIVATION, _LINEAR = "Dense has an activation or a residual", "on the linear layer"
CHANGES = [
    (lambda model: setattr(model[-1], "activation_function", nn.Tanh()), _ACTIVATION),
    (lambda model: model.__setitem__(-1, Dense(32, 16, use_residual=True).double()), _ACTIVATION),
    (lambda model: model[-1].linear.register_forward_pre_hook(lambda _module, args: (args[0] + 1,)), _LINEAR),
    (lambda model: model[-1].linear.register_full_backward_pre_hook(lambda _module, grads: (2 * grads[0],)), _LINEAR),
    (_linear_forward, _LINEAR),
    (lambda model: nn.utils.parametrizations.weight_norm(model[-1].linear), "is not PyTorch's"),
    (_lora, "is not PyTorch's"),
    (lambda model: model[-1].register_forward_hook(_cut_after), "is on Dense"),
    (lambda model: _cutting(model[-1]), "ends with Cutting"),
    (lambda model: _cutting(model), "Cutting may change"),
    (_replaced_forward, "is on ColBERT"),
    (_replaced_forward_in_mixed_precision, "is on ColBERT"),
    (lambda model: model.append(nn.Identity()), "ends with Identity"),
    (lambda model: model.insert(1, nn.Identity()), "Identity may change"),
    (lambda model: model.register_forward_hook(lambda _m, _a, output: _cut_short(output)), "is on ColBERT"),
    (lambda model: model.register_forward_pre_hook(lambda _, args: (dict(args[0]),)), "is on ColBERT"),
    (lambda model: model[0].register_forward_pre_hook(lambda _, args: (dict(args[0]),)), "is on Transformer"),
]


@pytest.mark.parametrize("change, reason", CHANGES)
def test_what_cannot_be_fused_runs_as_stock_and_says_why_once(encoder, projected, caplog, change, reason):
    model = load_model(encoder("bert")).double()
    change(model)
    loss_function, batch = losses.Contrastive(model), batch_of(model)
    stock = run(loss_function, batch)
    pylate_fastmaxsim.enable(stock_masking=True)
    for _ in range(2):
        assert_equal(run(loss_function, batch), stock)
    assert not projected
    assert [reason in message for message in caplog.messages if "head is not fused" in message] == [True]


def _prepared_for(dtype, model):
    """What accelerate makes of a model's forward for bf16=True or fp16=True."""
    forward = torch.autocast("cpu", dtype)(type(model).forward)
    model.forward = MethodType(convert_outputs_to_fp32(forward), model)


@pytest.mark.parametrize("loss_class, options", LOSSES)
def test_embeddings_stay_in_bfloat16_behind_accelerate(encoder, mode, projected, monkeypatch, loss_class, options):
    model = load_model(encoder("modernbert"))
    exact_function = loss_class(model, **options)
    batch, labels = batch_for(loss_class, model)
    exact = run(exact_function, batch, labels)
    _prepared_for(torch.bfloat16, model)
    stock = run(exact_function, batch, labels)
    scored = operators((pylate_losses, "maxsim"))(model, monkeypatch)
    with pylate_fastmaxsim.enabled(stock_masking=True):
        ours = run(exact_function, batch, labels)
    assert set(projected) == {torch.bfloat16}
    assert {tokens.values.dtype for args, _ in scored for tokens in args[:2]} == {torch.bfloat16}
    assert ours[0].dtype == torch.float32
    # No further from float32 than stock in the same precision, but for chance.
    assert distance(ours, exact) < 1.5 * distance(stock, exact)


def test_nobody_else_gets_unit_embeddings(encoder):
    model = load_model(encoder("bert"))
    batch, names = batch_of(model), list(model.state_dict())
    stock = model(dict(batch[1]))["token_embeddings"]
    with pylate_fastmaxsim.enabled():
        run(losses.Contrastive(model), batch)
        output = model(dict(batch[1]))
        assert torch.equal(output["token_embeddings"], stock) and "unit_embeddings" not in output
    assert unwrap(model) is model and "forward" not in vars(model[-1]) and list(model.state_dict()) == names


@pytest.mark.parametrize("prepared", [False, True])
def test_float16_gradients_of_gradcache_wait_in_float32(encoder, prepared):
    model = load_model(encoder("bert"))
    # Gradients below the smallest number of float16, until the loss is scaled in its backward.
    temperature, scale = (1e7, 2.0**24) if prepared else (1.0, 2.0**10)
    loss_function = losses.CachedContrastive(model, mini_batch_size=4, temperature=temperature)
    batch = batch_of(model)
    stock = run(loss_function, batch)
    if prepared:
        _prepared_for(torch.float16, model)
    pylate_fastmaxsim.enable(stock_masking=True)
    with nullcontext() if prepared else torch.autocast("cpu", torch.float16):
        loss = loss_function([dict(column) for column in batch])
    model.zero_grad()
    (loss * scale).backward()
    ours = {name: model.get_parameter(name).grad / scale for name in stock[1]}
    assert distance((loss, ours), stock) < 0.05
