"""Modules, activations and hooks that ``fuzz.py`` adds to models; a change is given token embeddings [N, L, d]."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def scaled(tokens: Tensor) -> Tensor:
    return 1.5 * tokens + 0.1


def centred(tokens: Tensor) -> Tensor:
    """Minus the mean over the tokens of each text, padding included."""
    return tokens - tokens.mean(dim=-2, keepdim=True)


def less_the_batch(tokens: Tensor) -> Tensor:
    return tokens - tokens.flatten(0, -2).mean(0)


class Activation(nn.Module):
    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.change = change

    def forward(self, tokens: Tensor) -> Tensor:
        return self.change(tokens)


class Own(nn.Module):
    """A module of the user's own behind the encoder; ``change`` is given itself, token embeddings and their mask."""

    def __init__(self, change: Callable[[Own, Tensor, Tensor], Tensor], layer: nn.Module | None = None) -> None:
        super().__init__()
        self.change, self.layer, self.calls = change, layer, 0

    def forward(self, features: dict, **_: object) -> dict:
        tokens = self.change(self, features["token_embeddings"], features["attention_mask"])
        self.calls += self.training
        return {**features, "token_embeddings": tokens}


def over_tokens(own: Own, tokens: Tensor, _: Tensor) -> Tensor:
    return own.layer(tokens.transpose(1, 2)).transpose(1, 2)


def less_its_text(_: Own, tokens: Tensor, mask: Tensor) -> Tensor:
    weights = mask.to(tokens)[..., None]
    return tokens - (tokens * weights).sum(1, keepdim=True) / weights.sum(1, keepdim=True).clamp(min=1)


class WithLengths(nn.Module):
    """Lengths for Sentence Transformers' LSTM, which its Transformer does not count."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, features: dict, **_: object) -> dict:
        found = self.inner({**features, "sentence_lengths": features["attention_mask"].sum(1)})
        missing = features["attention_mask"].shape[1] - found["token_embeddings"].shape[1]
        return {**found, "token_embeddings": F.pad(found["token_embeddings"], (0, 0, 0, missing))}


def of_library(name: str) -> type[nn.Module]:
    try:
        from sentence_transformers.sentence_transformer import modules as library
    except ImportError:  # before release 5.4
        from sentence_transformers import models as library
    return getattr(library, name)


def word_weights(width: int, vocabulary: list[str], smallest: float = 0.0) -> nn.Module:
    generator = random.Random(0)
    weights = {word: generator.choice([0.5, 1.0, 1.0, 2.0, smallest]) for word in vocabulary}
    return of_library("WordWeights")(vocabulary, weights)


# Modules by what they do to texts, and what makes them of the width and the vocabulary.
MODULES: dict[str, Callable[[int, list[str]], nn.Module]] = {
    "nn.Sequential": lambda width, _: nn.Sequential(Own(lambda _, tokens, __: tokens.tanh())),
    "WordWeights": word_weights,
    "WordWeights without zeros": partial(word_weights, smallest=0.3),
    "CNN": lambda width, _: of_library("CNN")(width, width // 2, [1, 3]),
    "LSTM": lambda width, _: WithLengths(of_library("LSTM")(width, width // 2)),
    "own tanh": lambda width, _: Own(lambda _, tokens, __: tokens.tanh()),
    "own Conv1d": lambda width, _: Own(over_tokens, nn.Conv1d(width, width, 3, padding=1)),
    "own mean with padding": lambda width, _: Own(lambda _, tokens, __: centred(tokens)),
    "own mean of the text": lambda width, _: Own(less_its_text),
}
MIXING_TEXTS = {
    "own mean of the batch": lambda width, _: Own(lambda _, tokens, __: less_the_batch(tokens)),
    "own BatchNorm1d": lambda width, _: Own(over_tokens, nn.BatchNorm1d(width)),
    "own count of calls": lambda width, _: Own(lambda own, tokens, _: tokens + own.calls * tokens.roll(1, -1)),
}
ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "Tanh": nn.Tanh,
    "ReLU": nn.ReLU,
    "Softmax(dim=1)": partial(nn.Softmax, dim=1),
    "Softmax(dim=-1)": partial(nn.Softmax, dim=-1),
    "own tanh": partial(Activation, torch.tanh),
    "own mean over tokens": partial(Activation, centred),
}
# Kinds of hooks; the last ones depend on all texts of a call.
HOOKS = ("looks", "scales", "scales what goes in", "centres", "scales gradients", "new forward scales")
HOOKS_MIXING_TEXTS = ("penalty", "takes the mean of the batch", "new forward takes the mean of the batch")


def changed(value: object, change: Callable[[Tensor], Tensor]) -> object:
    """What a module returns or is given, with its token embeddings changed."""
    match value:
        case Tensor():
            return change(value) if value.is_floating_point() and value.dim() > 1 else value
        case tuple():
            return (changed(value[0], change), *value[1:]) if value else value
        case dict():
            for key in ("token_embeddings", "last_hidden_state", "logits"):
                if value.get(key) is not None:
                    return type(value)({**value, key: change(value[key])})
    return value


def place_hook(module: nn.Module, kind: str, penalties: list[Tensor]) -> None:
    change = {"centres": centred}.get(kind, less_the_batch if "batch" in kind else scaled)
    match kind:
        case "looks":
            module.register_forward_hook(lambda *_: None)
        case "scales what goes in":
            module.register_forward_pre_hook(lambda _, args: changed(args, change))
        case "scales gradients":
            module.register_full_backward_hook(
                lambda _, given, __: tuple(each if each is None else 2 * each for each in given)
            )
        case "penalty":

            def collect(_, __, output):
                changed(output, lambda tokens: penalties.append(tokens.square().mean()) or tokens)

            module.register_forward_hook(collect)
        case "new forward scales" | "new forward takes the mean of the batch":
            stock = module.forward
            module.forward = lambda *args, **kwargs: changed(stock(*args, **kwargs), change)
        case _:
            module.register_forward_hook(lambda _, __, output: changed(output, change))
