"""Tokenise many texts in less of the host's time: what a fast tokenizer gives goes straight to padded ids.

A tokenizer of transformers makes Python lists of ids, masks and types of each text, pads them and makes tensors of the
lists. Beside a GPU that takes longer than encoding. The tokenizer's own code, in Rust, is the smaller part of it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import BatchEncoding, PreTrainedTokenizerBase

# With fewer texts the check takes longer than it saves.
FEW_TEXTS = 64
# Texts that both ways tokenise before the faster is taken.
_CHECKED = 16
# Where Sentence Transformers has the tokenizer of a Transformer, from release 6 on and before.
_ATTRIBUTES = ("processor", "tokenizer")


def faster(model: nn.Module, tokenize: Callable[[Any, list], dict], texts: list) -> Callable[[list], dict[str, Tensor]]:
    """``tokenize(model, texts)`` of the host for the texts, with a tokenizer that makes the same features faster.

    That of the model itself is left where it is no fast tokenizer, is given other texts than strings, or gives other
    features for the first of the texts.
    """

    def stock(batch: list) -> dict[str, Tensor]:
        return tokenize(model, batch)

    if len(texts) < FEW_TEXTS or (other := _with_fast_tokenizer(model)) is None:
        return stock
    first, checked = tokenize(other, texts[:_CHECKED]), stock(texts[:_CHECKED])
    same = first.keys() == checked.keys() and all(_same(first[key], checked[key]) for key in checked)
    return (lambda batch: tokenize(other, batch)) if same else stock


def _same(one: object, other: object) -> bool:
    if not torch.is_tensor(one) or not torch.is_tensor(other):
        return type(one) is type(other) and one == other
    return one.dtype == other.dtype and torch.equal(one, other)


def _with_fast_tokenizer(model: nn.Module) -> nn.Module | None:
    """A shallow copy of the model whose first module has another tokenizer, if it has one that can be replaced."""
    name, first = next(iter(model._modules.items()), ("", None))
    for attribute in _ATTRIBUTES:
        tokenizer = vars(first).get(attribute) if first is not None else None
        if isinstance(tokenizer, PreTrainedTokenizerBase) and tokenizer.is_fast and not tokenizer.split_special_tokens:
            module, other = copy.copy(first), copy.copy(model)
            faster_tokenizer = copy.copy(tokenizer)
            faster_tokenizer.__class__ = type(type(tokenizer).__name__, (_Straight, type(tokenizer)), {})
            vars(module)[attribute] = faster_tokenizer
            vars(other)["_modules"] = {**model._modules, name: module}
            return other
    return None


class _Straight:
    """Mixed into the class of a fast tokenizer: lists of single texts go straight to padded tensors."""

    def __call__(self, texts: Any = None, *more: Any, **options: Any) -> BatchEncoding:
        padding = options.get("padding")
        length = options.get("max_length") or self.model_max_length
        asked = {key: value for key, value in options.items() if key not in ("padding", "max_length")}
        if (
            more
            or asked != {"truncation": "longest_first", "return_tensors": "pt"}
            or padding not in (True, "max_length")
            or self.padding_side != "right"
            or length > 1_000_000
            or not isinstance(texts, list)
            or not all(isinstance(text, str) for text in texts)
        ):
            return super().__call__(texts, *more, **options)
        backend = self.backend_tokenizer
        backend.no_padding()
        backend.enable_truncation(length, strategy="longest_first", direction=self.truncation_side)
        # Without the offsets of tokens, where this release of tokenizers can leave them out.
        encode = getattr(backend, "encode_batch_fast", backend.encode_batch)
        rows = [encoding.ids for encoding in encode(texts)]
        lengths = np.fromiter(map(len, rows), np.int64, len(rows))
        width = length if padding == "max_length" else int(lengths.max(initial=0))
        attended = np.arange(width) < lengths[:, None]
        ids = np.full((len(rows), width), self.pad_token_id, np.int64)
        ids[attended] = np.fromiter(chain.from_iterable(rows), np.int64, int(lengths.sum()))
        made = {"input_ids": ids, "attention_mask": attended.astype(np.int64)}
        if "token_type_ids" in self.model_input_names:
            made["token_type_ids"] = np.where(attended, 0, self.pad_token_type_id)
        order = [name for name in ("input_ids", "token_type_ids", "attention_mask") if name in made]
        return BatchEncoding({name: torch.from_numpy(made[name]) for name in order})
