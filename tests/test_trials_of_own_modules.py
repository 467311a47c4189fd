"""What the trial on the first batch makes of modules and hooks of somebody's own, wherever in the model they are."""

from __future__ import annotations

import copy
import random
from functools import partial

import numpy as np
import pytest
import torch
from models import Behind, features, load_model
from pylate import losses
from test_losses import assert_equal, run
from test_packing import batch_of, mode_of
from torch import nn

import pylate_fastmaxsim


class _Merging(nn.Linear):
    """An adapter that train() takes out of the weight and eval() merges into it, as that of loralib."""

    def __init__(self, size: int) -> None:
        super().__init__(size, size)
        self.adapter = nn.Parameter(torch.eye(size) / 4)
        self.merged = False

    def train(self, training: bool = True):
        super().train(training)
        if self.merged == training:
            self.weight.data += self.adapter.data * (-1 if training else 1)
            self.merged = not training
        return self

    def forward(self, hidden):
        hidden = super().forward(hidden)
        return hidden if self.merged else hidden + hidden @ self.adapter


def _output_of(model) -> nn.Module:
    """A module inside of the last layer of a BERT."""
    return model[0].auto_model.encoder.layer[-1].output


@pytest.mark.parametrize("loss_class", [losses.Contrastive, losses.CachedContrastive])
def test_what_train_and_eval_do_besides_is_not_done(encoder, loss_class):
    def step():
        model = load_model(encoder("bert")).double()
        torch.manual_seed(0)
        adapted = _Merging(32).double()
        adapted.weight.requires_grad_(False)
        _output_of(model).dense = nn.Sequential(_output_of(model).dense, adapted)
        model.train()
        weight = adapted.weight.clone()
        result = run(loss_class(model), batch_of(model, collate=features))
        assert not adapted.merged and torch.equal(adapted.weight, weight)
        return result

    stock = step()
    assert any("adapter" in name for name in stock[1])
    pylate_fastmaxsim.enable(stock_masking=True)
    assert_equal(step(), stock)


class _Centred(nn.Module):
    """In training, every token without the mean of all tokens of the call."""

    def forward(self, hidden):
        return hidden - hidden.mean(dim=(0, 1)) if self.training else hidden


class _Counting(nn.Module):
    """Grows with the number of calls, counted in a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, hidden):
        self.calls += self.training
        return hidden * (1 + torch.linspace(0, self.calls / 10, hidden.shape[-1]))


class _Nested(nn.Module):
    """A running mean of all tokens, in a list in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.state = {"means": [torch.zeros(32)]}

    def forward(self, hidden):
        if self.training:
            self.state["means"][0].lerp_(hidden.detach().mean(dim=(0, 1)).to(torch.float32), 0.5)
        return hidden - self.state["means"][0].clone()


class _NestedBehind(Behind):
    """The terms of a regulariser under their names, for the script to add."""

    def __init__(self, dense) -> None:
        super().__init__(dense)
        self.terms = {"square": []}

    def change(self, given):
        if self.training:
            self.terms["square"].append(given["token_embeddings"].square().mean().item())
        return given


def _insert(kind, model):
    _output_of(model).dense = nn.Sequential(_output_of(model).dense, kind())


def _centre(output, module):
    return output - output.mean(dim=(0, 1)) if module.training else output


def _hook_in_encoder(model):
    _output_of(model).register_forward_hook(lambda module, _args, output: _centre(output, module))


def _forward_in_encoder(model):
    module = _output_of(model)
    forward = module.forward
    module.forward = lambda *args: _centre(forward(*args), module)


def _hook_in_backward(model):
    """Gradients of one size, whatever the loss."""
    _output_of(model).register_full_backward_hook(lambda _module, given, _: tuple(each / each.norm() for each in given))


def _hook_on_linear(model):
    model[1].linear.register_forward_hook(lambda module, _args, output: _centre(output, module))


def _pre_hook_on_dense(model):
    def centre(module, args):
        return ({**args[0], "token_embeddings": _centre(args[0]["token_embeddings"], module)},)

    model[1].register_forward_pre_hook(centre)


def _remember_behind(model):
    model[1] = _NestedBehind(model[1])


@pytest.mark.parametrize(
    "change",
    [
        *(partial(_insert, kind) for kind in (_Centred, _Counting, _Nested)),
        *(_hook_in_encoder, _forward_in_encoder, _hook_in_backward, _hook_on_linear, _pre_hook_on_dense),
        _remember_behind,
    ],
    ids=["centred", "counting", "nested", "hook", "forward", "backward", "hook on linear", "pre-hook", "nested behind"],
)
@pytest.mark.parametrize("loss_class", [losses.Contrastive, losses.CachedContrastive])
def test_what_depends_on_the_other_texts_of_a_call_is_padded(encoder, mode, change, loss_class):
    def steps():
        model = load_model(encoder("bert")).double()
        change(model)
        model.train()
        loss_function = loss_class(model)
        results = [run(loss_function, batch_of(model, seed=seed, collate=features)) for seed in (0, 3)]
        remembered = [module.terms for module in model.modules() if isinstance(module, _NestedBehind)]
        return model, results, remembered

    _, stock, of_stock = steps()
    pylate_fastmaxsim.enable(stock_masking=True)
    model, ours, remembered = steps()
    assert mode_of(model) == {"padded"}
    for one, other in zip(ours, stock, strict=True):
        assert_equal(one, other)
    for one, other in zip(remembered, of_stock, strict=True):
        assert one["square"] == pytest.approx(other["square"])


def test_modules_of_libraries_in_an_encoder_are_nobodys_own(encoder, mode):
    from peft import LoraConfig, TaskType

    model = load_model(encoder("bert"))
    model[0].auto_model.add_adapter(LoraConfig(task_type=TaskType.FEATURE_EXTRACTION, target_modules=["query"]))
    pylate_fastmaxsim.enable()
    run(losses.Contrastive(model), batch_of(model, collate=features))
    assert mode_of(model) == {mode}


class _Noisy(Behind):
    """Random numbers of torch, Python and NumPy, in and out of training, and so many as there are tokens."""

    def change(self, given):
        shape = given["token_embeddings"].shape[:2]
        noise = [torch.rand(shape), torch.tensor([random.random() for _ in range(shape.numel())]).view(shape)]
        noise.append(torch.from_numpy(np.random.rand(*shape)))
        given["token_embeddings"] = given["token_embeddings"] + sum(noise)[..., None] / 10
        return given


@pytest.mark.parametrize("loss_class", [losses.Contrastive, losses.CachedContrastive])
def test_the_trial_takes_no_random_numbers_of_the_run(encoder, loss_class):
    def step():
        model = load_model(encoder("bert")).double()
        model[1] = _Noisy(model[1])
        batch = batch_of(model, collate=features)
        torch.manual_seed(0), random.seed(0), np.random.seed(0)
        return run(loss_class(model), batch), torch.rand(1).item(), random.random(), np.random.rand()

    stock, *of_stock = step()
    pylate_fastmaxsim.enable(stock_masking=True)
    ours, *after = step()
    assert after == of_stock
    if loss_class is losses.Contrastive:  # the other encodes twice, with NumPy's and Python's next numbers
        assert_equal(ours, stock)


class _ByWidth(Behind):
    """Knows queries by their width: documents are padded to another one."""

    def __init__(self, dense, query_length: int) -> None:
        super().__init__(dense)
        self.query_length = query_length

    def change(self, given):
        if given["input_ids"].shape[1] == self.query_length:
            given["token_embeddings"] = given["token_embeddings"].flip(-1)
        return given


def test_a_head_that_knows_queries_by_their_width(encoder, mode):
    model = load_model(encoder("bert")).double()
    model[1] = _ByWidth(model[1], model.query_length)
    loss_function, batch = losses.Contrastive(model), batch_of(model, collate=features)
    stock = run(loss_function, batch)
    pylate_fastmaxsim.enable(stock_masking=True)
    assert_equal(run(loss_function, batch), stock)
    assert mode_of(model) == {"padded"}


class _OfEarlierLayer(nn.Module):
    """A head on the layer before the last."""

    def __init__(self, dense) -> None:
        super().__init__()
        self.dense = dense

    def forward(self, given):
        given["token_embeddings"] = given["all_layer_embeddings"][-2]
        return self.dense(given)


@pytest.mark.parametrize("loss_class", [losses.Contrastive, losses.CachedContrastive])
def test_outputs_of_layers_come_once_each_after_the_trial(encoder, mode, loss_class):
    def step():
        model = load_model(encoder("bert")).double()
        model[0].auto_model.config.output_hidden_states = True
        model[1] = _OfEarlierLayer(model[1])
        return model, run(loss_class(model), batch_of(model, collate=features))

    _, stock = step()
    pylate_fastmaxsim.enable(stock_masking=True)
    model, ours = step()
    assert_equal(ours, stock)
    assert mode_of(model) == {mode}


class _Hooking(Behind):
    """Puts a hook on the encoder in its first call."""

    handle = None

    def __init__(self, dense, encoder) -> None:
        super().__init__(dense)
        self.encoder = [encoder]

    def change(self, given):
        if self.handle is None:
            self.handle = self.encoder[0].embeddings.register_forward_hook(lambda _module, _args, output: 2 * output)
        return given


def test_a_hook_that_a_module_puts_somewhere_in_its_first_call_is_there_once(encoder, mode):
    def step():
        model = load_model(encoder("bert")).double()
        model[1] = _Hooking(model[1], model[0].auto_model)
        return run(losses.Contrastive(model), batch_of(model, collate=features))

    stock = step()
    pylate_fastmaxsim.enable(stock_masking=True)
    assert_equal(step(), stock)


class _TwoHeads(nn.Module):
    """A head of queries, known by their prefix, and one of documents that begins as its copy."""

    def __init__(self, model) -> None:
        super().__init__()
        self.of_queries, self.of_documents = model[1], copy.deepcopy(model[1])
        self.prefix = model.query_prefix_id

    def first(self, ids):
        return ids[:, 1:2] == self.prefix

    def forward(self, given):
        heads = (head.linear(given["token_embeddings"]) for head in (self.of_queries, self.of_documents))
        given["token_embeddings"] = torch.where(self.first(given["input_ids"])[..., None], *heads)
        return given


class _CentredQueries(_TwoHeads):
    """Queries without the mean of those in their call."""

    def forward(self, given):
        given = self.of_documents(given)
        if (given["input_ids"][:, 1] == self.prefix).all():
            given["token_embeddings"] = given["token_embeddings"] - given["token_embeddings"].mean(dim=(0, 1))
        return given


class _HeadOfDocument(_TwoHeads):
    """A head for each of two kinds of texts, told by their first word."""

    def __init__(self, model, is_copy: bool) -> None:
        super().__init__(model)
        if not is_copy:
            torch.nn.init.normal_(self.of_documents.linear.weight)

    def first(self, ids):
        return ids[:, 2:3] % 2 == 0


@pytest.mark.parametrize("is_copy", [True, False])
def test_heads_of_documents_that_are_known_by_their_first_word(encoder, mode, is_copy):
    model = load_model(encoder("bert")).double()
    model[1] = _HeadOfDocument(model, is_copy)
    loss_function, batch = losses.Contrastive(model), batch_of(model, collate=features)
    stock = run(loss_function, batch)
    pylate_fastmaxsim.enable(stock_masking=True)
    assert_equal(run(loss_function, batch), stock)
    assert mode_of(model) == {"grouped"}


@pytest.mark.parametrize(
    "loss_class, kind",
    [(losses.Contrastive, _TwoHeads), (partial(losses.CachedContrastive, mini_batch_size=2), _CentredQueries)],
    ids=["joint", "divided"],
)
def test_a_head_that_knows_queries_by_their_prefix(encoder, mode, caplog, loss_class, kind):
    model = load_model(encoder("bert")).double()
    model[1] = kind(model)
    loss_function, batch = loss_class(model), batch_of(model, collate=features)
    stock = run(loss_function, batch)
    pylate_fastmaxsim.enable(stock_masking=True)
    ours = run(loss_function, batch)
    assert ours[1].keys() == stock[1].keys()
    assert_equal(ours, stock)
    assert mode_of(model) == {mode}
    queries_alone = f"{kind.__name__} is of somebody's own or has hooks, and may know queries"
    assert (queries_alone in caplog.text) == (kind is _CentredQueries or mode == "packed")


def test_hooks_on_weights_see_the_gradients_of_gradcache_that_stock_gives_them(encoder, mode, caplog):
    model = load_model(encoder("bert")).double()
    for weight in model.parameters():
        weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
    batch = batch_of(model, collate=features)
    of_stock = [run(loss(model), batch) for loss in (losses.Contrastive, losses.CachedContrastive)]
    pylate_fastmaxsim.enable(stock_masking=True)
    assert_equal(run(losses.Contrastive(model), batch), of_stock[0])
    assert mode_of(model) == {mode} and "hook" not in caplog.text
    assert_equal(run(losses.CachedContrastive(model), batch), of_stock[1])
    assert "a hook on 0.auto_model.embeddings.word_embeddings.weight sees the gradient of each call" in caplog.text
