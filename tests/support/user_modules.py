"""What somebody may add to a model that makes of a text what depends on the other texts of its call, or on the call."""

from __future__ import annotations

import copy
from functools import partial

import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from models import Behind
from pylate.models import ColBERT
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.models.bert.modeling_bert import BertLayer


class Tokenwise(Behind):
    """Treats each token by itself."""

    def change(self, features):
        return {**features, "token_embeddings": features["token_embeddings"].tanh()}


class Centred(Behind):
    """In training, every token without the mean of all tokens of the call."""

    @torch.autocast("cpu", enabled=False)  # a decorator of a library, which is in front of what it decorates
    def change(self, features):
        embeddings = features["token_embeddings"]
        if self.training:
            features["token_embeddings"] = embeddings - embeddings.mean(dim=(0, 1))
        return features


class Gated(Behind):
    """The mean of all tokens, through a gate that begins at zero."""

    def __init__(self, dense) -> None:
        super().__init__(dense)
        self.gate = nn.Parameter(torch.zeros(()))

    def change(self, features):
        embeddings = features["token_embeddings"]
        return {**features, "token_embeddings": embeddings + self.gate * embeddings.mean(dim=(0, 1))}


class Counting(Behind):
    """Grows with the number of calls, in training or not, counted in a plain attribute."""

    calls = 0

    def change(self, features):
        self.calls += 1
        return {**features, "token_embeddings": features["token_embeddings"] * (1 + self.calls / 10)}


class Collecting(Behind):
    """The terms of a regulariser under their names, for the script to add."""

    def __init__(self, dense) -> None:
        super().__init__(dense)
        self.terms = {"square": []}

    def change(self, features):
        self.terms["square"].append(features["token_embeddings"].square().mean().item())
        return features


class Leaving(Behind):
    """A term of a regulariser in the features, for a loss that is built on another."""

    def change(self, features):
        features["term"] = features["token_embeddings"].square().mean()
        return features


class Moving(Behind):
    """A mean of all tokens so far, in a parameter without a gradient as those of codebooks are."""

    def __init__(self, dense) -> None:
        super().__init__(dense)
        self.mean = nn.Parameter(torch.zeros(16), requires_grad=False)

    def change(self, features):
        embeddings = features["token_embeddings"]
        self.mean.data.lerp_(embeddings.detach().mean(dim=(0, 1)), 0.1)
        return {**features, "token_embeddings": embeddings - self.mean.detach().clone()}


class Noisy(Behind):
    """Random numbers that torch does not know of, as many as there are tokens."""

    def __init__(self, dense) -> None:
        super().__init__(dense)
        self.generator = torch.Generator()

    def change(self, features):
        embeddings = features["token_embeddings"]
        return {**features, "token_embeddings": embeddings + torch.rand(embeddings.shape, generator=self.generator)}


class Scaling(Behind):
    """A parameter that is made of the first call."""

    def __init__(self, dense) -> None:
        super().__init__(dense)
        self.register_parameter("scale", None)

    def change(self, features):
        embeddings = features["token_embeddings"]
        if self.scale is None:
            self.scale = nn.Parameter(1 / embeddings.detach().std(dim=(0, 1)))
        return {**features, "token_embeddings": embeddings * self.scale}


class TwoHeads(nn.Module):
    """A head of queries, known by their prefix, and one of documents that begins as its copy."""

    def __init__(self, dense, prefix: int) -> None:
        super().__init__()
        self.of_queries, self.of_documents, self.prefix = dense, copy.deepcopy(dense), prefix

    def forward(self, features):
        heads = (head.linear(features["token_embeddings"]) for head in (self.of_queries, self.of_documents))
        is_query = features["input_ids"][:, 1:2] == self.prefix
        return {**features, "token_embeddings": torch.where(is_query[..., None], *heads)}


class Merging(nn.Linear):
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


class CentredWhole(ColBERT):
    def forward(self, features, **kwargs):
        features = super().forward(features, **kwargs)
        embeddings = features["token_embeddings"]
        return {**features, "token_embeddings": embeddings - embeddings.mean(dim=(0, 1))}


def _behind(kind, model) -> None:
    model[1] = kind(model[1]).to(model.dtype)


def _two_heads(model) -> None:
    model[1] = TwoHeads(model[1], model.query_prefix_id)


def _whole(model) -> None:
    model.__class__ = CentredWhole


def output_of_last_layer(model) -> nn.Module:
    """A module inside of the last layer of a BERT."""
    return model[0].auto_model.encoder.layer[-1].output


def _in_encoder(model) -> None:
    output = output_of_last_layer(model)
    output.dense = nn.Sequential(output.dense, Merging(32).to(model.dtype))


def _centre(output):
    return output - output.mean(dim=(0, 1))


def _hook(model) -> None:
    output_of_last_layer(model).register_forward_hook(lambda _module, _args, output: _centre(output))


def _hook_that_collects(model) -> None:
    """In a list of the script, at no module."""
    model.seen = []
    seen = model.seen
    output_of_last_layer(model).register_forward_hook(lambda _module, _args, output: seen.append(output.sum().item()))


def _hook_on_linear(model) -> None:
    model[1].linear.register_forward_hook(lambda _module, _args, output: _centre(output))


def _pre_hook(model) -> None:
    model[1].register_forward_pre_hook(
        lambda _module, args: ({**args[0], "token_embeddings": _centre(args[0]["token_embeddings"])},)
    )


def _backward_hook(model, decorator=lambda hook: hook) -> None:
    """Gradients of one size, whatever the loss."""
    output_of_last_layer(model).register_full_backward_hook(
        decorator(lambda _module, given, _: tuple(each / each.norm() for each in given))
    )


def _hook_of_accelerate(model) -> None:
    class Centring(ModelHook):
        def post_forward(self, module, output):
            return _centre(output)

    for hook in (ModelHook(), Centring()):
        add_hook_to_module(output_of_last_layer(model), hook, append=True)


def _method(model) -> None:
    """That the forward of a layer calls."""
    layer = model[0].auto_model.encoder.layer[-1]
    method = layer.feed_forward_chunk
    layer.feed_forward_chunk = lambda hidden: _centre(method(hidden))


def _method_of_subclass(model) -> None:
    class Layer(BertLayer):
        def feed_forward_chunk(self, attention_output):
            return _centre(super().feed_forward_chunk(attention_output))

    model[0].auto_model.encoder.layer[-1].__class__ = Layer


class Scripted(nn.Module):
    def forward(self, hidden: torch.Tensor):
        return hidden - hidden.mean(dim=[0, 1])


def _scripted(model) -> None:
    output = output_of_last_layer(model)
    output.dense = nn.Sequential(output.dense, torch.jit.script(Scripted()))


def _forward(model, decorator=lambda forward: forward) -> None:
    module = output_of_last_layer(model)
    forward = module.forward
    module.forward = decorator(lambda *args: _centre(forward(*args)))


# What to do to a model around a BERT, and how the sentence about it begins.
ADDED = {
    "centred": (partial(_behind, Centred), "Centred is a module of your own"),
    "gated": (partial(_behind, Gated), "Gated is a module of your own"),
    "counting": (partial(_behind, Counting), "Counting is a module of your own"),
    "collecting": (partial(_behind, Collecting), "Collecting is a module of your own"),
    "moving": (partial(_behind, Moving), "Moving is a module of your own"),
    "noisy": (partial(_behind, Noisy), "Noisy is a module of your own"),
    "scaling": (partial(_behind, Scaling), "Scaling is a module of your own"),
    "two heads": (_two_heads, "TwoHeads is a module of your own"),
    "whole": (_whole, "CentredWhole is a module of your own"),
    "in the encoder": (_in_encoder, "Merging is a module of your own"),
    "hook": (_hook, "a hook of your own is on BertOutput"),
    "collecting hook": (_hook_that_collects, "a hook of your own is on BertOutput"),
    "hook on linear": (_hook_on_linear, "a hook of your own is on Linear"),
    "pre-hook": (_pre_hook, "a hook of your own is on Dense"),
    "backward hook": (_backward_hook, "a hook of your own is on BertOutput"),
    "decorated hook": (partial(_backward_hook, decorator=torch.no_grad()), "a hook of your own is on BertOutput"),
    "hook of accelerate": (_hook_of_accelerate, "a hook of your own is on BertOutput"),
    "forward": (_forward, "BertOutput is a module of your own"),
    "forward in a partial": (
        partial(_forward, decorator=lambda forward: partial(checkpoint, forward, use_reentrant=False)),
        "BertOutput is a module of your own",
    ),
    "method": (_method, "BertLayer is a module of your own"),
    "method of a subclass": (_method_of_subclass, "Layer is a module of your own"),
    "scripted": (_scripted, "RecursiveScriptModule is a module of your own"),
}
