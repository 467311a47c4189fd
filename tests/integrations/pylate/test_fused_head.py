"""The fused head in PyLate's losses: loss and gradients as in stock, or as with plain Dense where it does not apply."""

from __future__ import annotations

import logging
from functools import wraps
from types import MethodType

import pytest
import torch
from accelerate.utils import convert_outputs_to_fp32
from compared import assert_equal, batch_of, run
from models import features, load_model, sentences
from peft import LoraConfig
from pylate import losses, models
from pylate.models import Dense
from torch import nn

import pylate_fastmaxsim
from pylate_fastmaxsim.integrations.models.wrappers import unwrap
from pylate_fastmaxsim.integrations.pylate import fused_head

LOSSES = [
    (losses.Contrastive, {}),
    (losses.CachedContrastive, {"mini_batch_size": 4, "score_mini_batch_size": 3}),
    (losses.Distillation, {}),
]


@pytest.fixture
def projected(monkeypatch):
    """The dtypes of what the fused head made."""
    seen = []
    original = fused_head.project_normalize

    def recording(*args):
        output = original(*args)
        seen.append(output.dtype)
        return output

    monkeypatch.setattr(fused_head, "project_normalize", recording)
    return seen


def distance(one, other) -> float:
    """Between the gradients of two runs, relative to those of the other."""
    assert one[1].keys() == other[1].keys()
    difference = sum((one[1][name] - gradient).square().sum() for name, gradient in other[1].items())
    return (difference / sum(gradient.square().sum() for gradient in other[1].values())).sqrt().item()


def problem(model, loss_class):
    if loss_class is not losses.Distillation:
        return batch_of(model), None
    return features(model, sentences(4, longest=8), sentences(12, seed=1)), torch.rand(4, 3)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("loss_class, options", LOSSES)
def test_loss_and_gradients_are_those_of_stock_in_float32(encoder, mode, projected, loss_class, options, bias):
    model = load_model(encoder("modernbert"), bias=bias)
    assert (model[-1].linear.bias is not None) == bias
    loss_function = loss_class(model, **options)
    batch, labels = problem(model, loss_class)
    stock = run(loss_function, batch, labels)
    assert not projected
    with pylate_fastmaxsim.enabled(stock_masking=True):
        ours = run(loss_function, batch, labels)
    assert projected
    assert ours[0].item() == pytest.approx(stock[0].item(), rel=1e-5)
    assert distance(ours, stock) < 1e-5
    projected.clear()
    with pylate_fastmaxsim.enabled(stock_masking=True, fused_head=False):
        run(loss_function, batch, labels)
    assert not projected


def test_inside_a_compiled_loss_the_head_is_not_fused(encoder, caplog):
    model = load_model(encoder("bert"))
    pylate_fastmaxsim.enable()
    torch.compile(losses.Contrastive(model), backend="eager")(batch_of(model), None)
    assert (
        "The head is not fused, Dense and normalisation run one after the other: torch.compile compiles the loss."
        in (caplog.text)
    )


@pytest.mark.parametrize("options", [{"padding_free": False}, {"compile": True}], ids=str)
def test_other_options(encoder, projected, traced, options):
    model = load_model(encoder("modernbert", num_hidden_layers=1))
    loss_function, batch = losses.Contrastive(model), batch_of(model)
    stock = run(loss_function, batch)
    with pylate_fastmaxsim.enabled(stock_masking=True, **options):
        assert_equal(run(loss_function, batch), stock, 1e-4)
    assert projected


def test_the_last_of_chained_dense_modules_is_fused(encoder, projected):
    model = load_model(encoder("bert")).double()
    model.append(Dense(16, 8, bias=True).double())
    loss_function, batch = losses.Contrastive(model), batch_of(model)
    stock = run(loss_function, batch)
    assert "2.linear.bias" in stock[1]
    with pylate_fastmaxsim.enabled(stock_masking=True):
        assert_equal(run(loss_function, batch), stock)
    assert projected


def _cut_short(features):
    return {**features, "token_embeddings": features["token_embeddings"][..., :8]}


def _subclass_of_model(model):
    class Cutting(type(model)):
        def forward(self, *args, **kwargs):
            return _cut_short(super().forward(*args, **kwargs))

    model.__class__ = Cutting


def _replaced_forward(model):
    forward = model.forward
    model.forward = wraps(forward)(lambda *args, **kwargs: _cut_short(forward(*args, **kwargs)))


def _replaced_forward_in_mixed_precision(model):
    _replaced_forward(model)
    model.forward = convert_outputs_to_fp32(model.forward)


def _hook_on_dense(model):
    model[-1].register_forward_hook(lambda _module, _args, output: _cut_short(output))


def _decorated_hook_on_dense(model):
    model[-1].register_forward_hook(
        torch.autocast("cpu", enabled=False)(lambda _module, _args, output: _cut_short(output))
    )


def _call_of_dense(model):
    class Calling(Dense):
        def __call__(self, *args, **kwargs):
            return _cut_short(super().__call__(*args, **kwargs))

    model[-1].__class__ = Calling


def _hook_on_model(model):
    model.register_forward_hook(lambda _module, _args, output: _cut_short(output))


def _linear_forward(model):
    forward = model[-1].linear.forward
    model[-1].linear.forward = lambda hidden: forward(hidden) + 1


def _activate(model):
    model[-1].activation_function = nn.Tanh()


class _Squashing(nn.Identity):
    def forward(self, embeddings):
        return embeddings.tanh()


def _squash(model):
    model[-1].activation_function = _Squashing()


def _hook_on_activation(model):
    model[-1].activation_function = nn.Identity()  # else that of all models
    model[-1].activation_function.register_forward_hook(lambda _module, _args, output: output.tanh())


def _residual(model):
    model[-1] = Dense(32, 16, bias=False, use_residual=True).double()


def _hook(model):
    model[-1].linear.register_forward_hook(lambda *_: None)


def _pre_hook(model):
    model[-1].linear.register_forward_pre_hook(lambda _module, args: (args[0] + 1,))


def _backward_hook(model):
    model[-1].linear.register_full_backward_hook(lambda _module, grads, _outputs: (2 * grads[0],))


def _backward_pre_hook(model):
    model[-1].linear.register_full_backward_pre_hook(lambda _module, grads: (2 * grads[0],))


def _adapter(model):
    model.append(Dense(16, 8).double())
    model.append(nn.Identity())


def _subclass(model):
    class Doubled(Dense):
        def forward(self, features):
            features = super().forward(features)
            features["token_embeddings"] = features["token_embeddings"] + 1
            return features

    model[-1] = Doubled(32, 16, bias=False).double()


def _parametrized(model):
    nn.utils.parametrizations.weight_norm(model[-1].linear)


class _Forgetful(nn.Module):
    def forward(self, features):
        return {"token_embeddings": features["token_embeddings"]}


def _forgets(model):
    model.insert(1, _Forgetful())


def _moved(features):
    return {name: feature.to("cpu") for name, feature in features.items()}


class _Moving(nn.Module):
    """Takes all features for tensors."""

    def forward(self, features):
        return _moved(features)


def _move_features(model):
    model.insert(1, _Moving())


def _pre_hook_on_model(model):
    model.register_forward_pre_hook(lambda _module, args: (_moved(args[0]),))


def _pre_hook_on_encoder(model):
    model[0].register_forward_pre_hook(lambda _module, args: (_moved(args[0]),))


@pytest.mark.parametrize(
    "register",
    [nn.modules.module.register_module_forward_pre_hook, nn.modules.module.register_module_full_backward_hook],
)
def test_hooks_of_all_modules_are_called(encoder, register):
    model, called = load_model(encoder("bert")).double(), []
    loss_function, batch = losses.Contrastive(model), batch_of(model)
    pylate_fastmaxsim.enable()
    handle = register(lambda module, *_: called.append(module) if isinstance(module, nn.Linear) else None)
    try:
        run(loss_function, batch)
    finally:
        handle.remove()
    assert model[-1].linear in called


@pytest.mark.parametrize(
    "change, reason",
    [
        (_activate, "activation Tanh"),
        (_residual, "adds a residual"),
        (_hook, "has hooks"),
        (_pre_hook, "has hooks"),
        (_backward_hook, "has hooks"),
        (_backward_pre_hook, "has hooks"),
        (_hook_on_dense, "Dense has hooks of your own"),
        (_decorated_hook_on_dense, "Dense has hooks of your own"),
        (_call_of_dense, "__call__ of Calling is not PyTorch's own"),
        (_hook_on_model, "ColBERT has hooks of your own"),
        (_linear_forward, "forward of Dense's linear layer was replaced"),
        (_subclass_of_model, "forward of Cutting is not PyLate's own"),
        (_replaced_forward, "forward of ColBERT was replaced"),
        (_replaced_forward_in_mixed_precision, "forward of ColBERT was replaced"),
        (_adapter, "ends with Identity"),
        (_subclass, "forward of Doubled is not PyLate's own"),
        (_parametrized, "linear layer of Dense is a torch.nn.utils.parametrize.ParametrizedLinear"),
        (_forgets, "_Forgetful may look at anything that the model is given"),
        (_move_features, "_Moving may look at anything that the model is given"),
        (_pre_hook_on_model, "ColBERT has hooks of your own, which may change what it takes or returns"),
        (_pre_hook_on_encoder, "Transformer has hooks of your own, which may change what it takes or returns"),
        (_squash, "activation _Squashing"),
        (_hook_on_activation, "the activation of Dense has hooks"),
    ],
)
def test_what_cannot_be_fused_runs_as_stock_and_says_why_once(encoder, projected, caplog, change, reason):
    model = load_model(encoder("bert")).double()
    change(model)
    loss_function, batch = losses.Contrastive(model), batch_of(model)
    stock = run(loss_function, batch)
    pylate_fastmaxsim.enable(stock_masking=True)
    with caplog.at_level(logging.WARNING, "pylate_fastmaxsim"):
        for _ in range(2):
            assert_equal(run(loss_function, batch), stock)
    assert not projected
    assert [reason in record.message for record in caplog.records if "head is not fused" in record.message] == [True]


def test_a_forward_of_all_linear_layers_is_called(encoder, projected, monkeypatch):
    model = load_model(encoder("bert")).double()
    loss_function, batch, forward = losses.Contrastive(model), batch_of(model), nn.Linear.forward
    monkeypatch.setattr(nn.Linear, "forward", lambda self, hidden: forward(self, hidden).tanh())
    stock = run(loss_function, batch)
    pylate_fastmaxsim.enable(stock_masking=True)
    assert_equal(run(loss_function, batch), stock)
    assert not projected


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated")
def test_a_quantized_layer_is_named_in_full(encoder, projected, caplog):
    model = load_model(encoder("bert"))
    model[-1] = torch.ao.quantization.quantize_dynamic(model[-1], {nn.Linear})
    pylate_fastmaxsim.enable()
    losses.Contrastive(model)(batch_of(model))
    assert not projected
    assert "the linear layer of Dense is a torch.ao.nn.quantized.dynamic.modules.linear.Linear." in caplog.text


def test_lora_on_the_encoder_and_on_the_dense_layer(encoder, projected):
    for target in (["query", "value"], ["query", "linear"]):
        model = load_model(encoder("bert"))
        model.add_adapter(LoraConfig(r=4, target_modules=["query", "value"], lora_dropout=0.0))
        if "linear" in target:
            from peft import inject_adapter_in_model

            inject_adapter_in_model(LoraConfig(r=4, target_modules=["linear"], lora_dropout=0.0), model[-1])
        model.double().train()
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if "lora_B" in name:
                    weight.normal_(std=0.1)
        loss_function, batch = losses.Contrastive(model), batch_of(model)
        stock = run(loss_function, batch)
        projected.clear()
        with pylate_fastmaxsim.enabled(stock_masking=True):
            assert_equal(run(loss_function, batch), stock)
        assert bool(projected) == ("linear" not in target)


def _prepared_for(dtype, model):
    """What accelerate makes of a model's forward for bf16=True or fp16=True."""
    forward = torch.autocast("cpu", dtype)(type(model).forward)
    model.forward = MethodType(convert_outputs_to_fp32(forward), model)


@pytest.mark.parametrize("loss_class, options", LOSSES)
def test_embeddings_stay_in_bfloat16_behind_accelerate(encoder, mode, projected, monkeypatch, loss_class, options):
    from pylate_fastmaxsim.integrations.pylate import losses as pylate_losses

    model = load_model(encoder("modernbert"))
    exact_function = loss_class(model, **options)
    batch, labels = problem(model, loss_class)
    exact = run(exact_function, batch, labels)
    _prepared_for(torch.bfloat16, model)
    stock = run(exact_function, batch, labels)
    scored = []
    maxsim = pylate_losses.maxsim

    def recording(queries, documents, *args, **kwargs):
        scored.append((queries.values.dtype, documents.values.dtype))
        return maxsim(queries, documents, *args, **kwargs)

    monkeypatch.setattr(pylate_losses, "maxsim", recording)
    with pylate_fastmaxsim.enabled(stock_masking=True):
        ours = run(exact_function, batch, labels)
    assert set(projected) == {torch.bfloat16} and set(scored) == {(torch.bfloat16, torch.bfloat16)}
    assert ours[0].dtype == torch.float32
    # No further from float32 than stock in the same precision, but for chance.
    assert distance(ours, exact) < 1.5 * distance(stock, exact)


def test_a_model_trained_with_it_is_an_ordinary_model(encoder, tmp_path):
    model = load_model(encoder("bert"))
    batch = batch_of(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    names = list(model.state_dict())
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    with pylate_fastmaxsim.enabled():
        run(losses.Contrastive(model), batch)
        optimizer.step()
        model.save_pretrained(str(tmp_path))
    assert all((model.get_parameter(name) != old).any() for name, old in before.items() if "linear" in name)
    assert list(model.state_dict()) == names
    again = models.ColBERT(model_name_or_path=str(tmp_path), device="cpu")
    own, other = (m.eval().encode(["Why is the sky blue?"], is_query=False) for m in (model, again))
    torch.testing.assert_close(torch.as_tensor(own[0]), torch.as_tensor(other[0]))


def test_nobody_else_gets_unit_embeddings(encoder):
    model = load_model(encoder("bert"))
    batch = batch_of(model)
    stock = model(dict(batch[1]))["token_embeddings"]
    with pylate_fastmaxsim.enabled():
        run(losses.Contrastive(model), batch)
        output = model(dict(batch[1]))
        assert torch.equal(output["token_embeddings"], stock)
        assert "unit_embeddings" not in output
    assert unwrap(model) is model and "forward" not in vars(model[-1])


def test_float16_gradients_of_gradcache_wait_in_float32(encoder):
    model = load_model(encoder("bert"))
    loss_function = losses.CachedContrastive(model, mini_batch_size=4)
    batch = batch_of(model)
    stock = run(loss_function, batch)
    pylate_fastmaxsim.enable(stock_masking=True)
    with torch.autocast("cpu", torch.float16):
        loss = loss_function([dict(column) for column in batch])
    model.zero_grad()
    (loss * 2.0**10).backward()
    total = torch.cat([gradient.flatten() for gradient in stock[1].values()])
    own = torch.cat([model.get_parameter(name).grad.flatten() for name in stock[1]]) / 2.0**10
    assert torch.isfinite(own).all()
    assert (own - total).norm() < 0.05 * total.norm()


def test_small_gradients_of_gradcache_wait_in_float32(encoder, projected):
    model = load_model(encoder("bert"))
    # Gradients below the smallest number of float16, until the loss is scaled in its backward.
    loss_function = losses.CachedContrastive(model, mini_batch_size=4, temperature=1e7)
    batch = batch_of(model)
    stock = run(loss_function, batch)
    _prepared_for(torch.float16, model)
    pylate_fastmaxsim.enable(stock_masking=True)
    loss = loss_function([dict(column) for column in batch])
    assert set(projected) == {torch.float16}
    model.zero_grad()
    (loss * 2.0**24).backward()
    total = torch.cat([gradient.flatten() for gradient in stock[1].values()])
    own = torch.cat([model.get_parameter(name).grad.flatten() for name in stock[1]]) / 2.0**24
    assert (own - total).norm() < 0.05 * total.norm()
