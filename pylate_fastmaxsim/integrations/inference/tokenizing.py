"""Tokenise many texts in less of the host's time: what a fast tokenizer gives goes straight to padded ids.

A tokenizer of transformers makes Python lists of ids, masks and types of each text, pads them and makes tensors of the
lists. Beside a GPU that takes longer than encoding. The tokenizer's own code, in Rust, is the smaller part of it.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import BatchEncoding, PreTrainedTokenizerBase

from pylate_fastmaxsim.integrations.log import log_once

# With fewer texts the check takes longer than it saves.
FEW_TEXTS = 64
# Texts that both ways tokenise before the faster is taken.
_CHECKED = 16
# Where Sentence Transformers has the tokenizer of a Transformer, from release 6 on and before.
_ATTRIBUTES = ("processor", "tokenizer")
_SLOWER = "encode tokenises as transformers does, which may keep a GPU waiting: %s."


def faster(model: nn.Module, tokenize: Callable[[Any, list], dict], texts: list) -> Callable[[list], dict[str, Tensor]]:
    """``tokenize(model, texts)`` of the host for the texts, with a tokenizer that makes the same features faster.

    That of the model itself is left where it is no fast tokenizer, is given other texts than strings, or gives other
    features for the first of the texts.
    """

    def stock(batch: list) -> dict[str, Tensor]:
        return tokenize(model, batch)

    if len(texts) < FEW_TEXTS:
        return stock
    if (other := _with_fast_tokenizer(model)) is None:
        log_once(_SLOWER, "the model does not begin with a fast tokenizer", level=logging.INFO, about=model)
        return stock
    first, checked = tokenize(other, texts[:_CHECKED]), stock(texts[:_CHECKED])
    if first.keys() == checked.keys() and all(_same(first[key], checked[key]) for key in checked):
        return lambda batch: tokenize(other, batch)
    log_once(_SLOWER, "its tokenizer gives other features when called directly", level=logging.INFO, about=model)
    return stock


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


# Features of texts, and where the tokenizers library has them.
_COLUMNS = {"input_ids": "ids", "token_type_ids": "type_ids", "attention_mask": "attention_mask"}


class _Straight:
    """Mixed into the class of a fast tokenizer: lists of single texts go straight to padded tensors."""

    def __call__(self, texts: Any = None, *more: Any, **options: Any) -> BatchEncoding:
        is_plain = not more and options.keys() <= {"padding", "truncation", "max_length", "return_tensors"}
        if not (is_plain and options.get("padding") and options.get("return_tensors") == "pt"):
            return super().__call__(texts, *more, **options)
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            return super().__call__(texts, **options)
        # It also has the tokenizer cut off and pad as asked, where it does not yet: threads share one.
        names = super().__call__(texts[:1], **options).keys()
        if names - _COLUMNS.keys():
            return super().__call__(texts, **options)
        backend = self.backend_tokenizer
        # Without the offsets of tokens, where this release of tokenizers can leave them out.
        encoded = getattr(backend, "encode_batch_fast", backend.encode_batch)(texts)
        columns = {name: np.array([getattr(each, _COLUMNS[name]) for each in encoded], np.int64) for name in names}
        return BatchEncoding({name: torch.from_numpy(column) for name, column in columns.items()})
