"""GradCache of Sentence Transformers: the second pass encodes as the first did, in the same precision.

Where ``backward()`` is called outside of autocast, stock makes the second pass in float32, whose embeddings are not those
that the cached gradients belong to. Without padding, dropout would be drawn differently as well.

The second pass reuses what the first found out about its texts. So it does not wait for the device, and the host launches
a mini-batch while the backward of the last is still running.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import wraps
from typing import TypeVar
from weakref import WeakKeyDictionary

import torch
from sentence_transformers.base.losses import gradcache
from sentence_transformers.multi_vector_encoder.losses import CachedMultiVectorMultipleNegativesRankingLoss
from torch import Tensor, nn

from pylate_fastmaxsim.integrations.encoding.autocast import autocast_in_force
from pylate_fastmaxsim.integrations.encoding.batch import Documents
from pylate_fastmaxsim.integrations.encoding.mask_changes import writes_to
from pylate_fastmaxsim.integrations.log import log_once
from pylate_fastmaxsim.integrations.models.context import setting
from pylate_fastmaxsim.integrations.options import current_options
from pylate_fastmaxsim.integrations.patching.patches import Patch
from pylate_fastmaxsim.integrations.patching.redirect import detached
from pylate_fastmaxsim.integrations.sentence_transformers import joint as sentence_transformers_joint

Found = TypeVar("Found")


@dataclass
class _First:
    """What the second pass over some texts is to have in common with the first."""

    autocast: dict[str, object]
    writes: int
    found: list[object] = field(default_factory=list)


@dataclass
class _Pass:
    """The pass that is being made: the first notes what it finds, the second has it again."""

    found: list[object] | Iterator[object]
    texts_changed: bool = False


_pass: ContextVar[_Pass | None] = ContextVar("pass", default=None)

# By the random numbers that the second pass is to draw again.
_firsts: WeakKeyDictionary[object, _First] = WeakKeyDictionary()

_NOTHING = object()

# 32 passages of MS MARCO have some 2,560 tokens: a step of ModernBERT-base took about as long as in stock. With 9,600
# tokens it was more than 3 times as fast. Where in between a GPU has enough to do depends on encoder and host.
_FEW_TOKENS = 4096

_FEW = (
    "Mini-batches of %s texts hold few tokens without padding, so the GPU may wait for the host. To fill them, give the "
    "loss mini_batch_num_tokens; %s times document_length is what padded ones hold."
)


def patches() -> list[Patch]:
    """What to replace in Sentence Transformers."""
    return [
        Patch(CachedMultiVectorMultipleNegativesRankingLoss, "embed_minibatch", embed_minibatch),
        Patch(gradcache, "_create_minibatch", create_minibatch),
    ]


def replay(find: Callable[[], Found], of_texts: bool = False) -> Found:
    """What ``find`` found in the first pass over some texts, in the order of the questions, or finds now.

    Answers are ``of_texts`` that do not hold any more once somebody has written to the texts in between.
    """
    current = _pass.get()
    if current is None:
        return find()
    if isinstance(current.found, list):
        current.found.append(found := find())
        return found
    found = next(current.found, _NOTHING)
    return find() if found is _NOTHING or (of_texts and current.texts_changed) else found


def inside() -> bool:
    """Whether a mini-batch is encoded, which is to have a backward of its own."""
    return _pass.get() is not None


_stock_create = detached(gradcache._create_minibatch)


@wraps(_stock_create)
def create_minibatch(*args, **kwargs) -> dict[str, object]:
    """Some texts of a column. To cut them to the longest, the stock function waits for the device."""
    if _pass.get() is None:  # of other losses
        return _stock_create(*args, **kwargs)
    # A copy, because whoever encodes texts adds to them.
    return dict(replay(lambda: dict(_stock_create(*args, **kwargs)), of_texts=True))


_stock_embed = detached(CachedMultiVectorMultipleNegativesRankingLoss.embed_minibatch)
_parameters = inspect.signature(_stock_embed)


@wraps(_stock_embed)
def embed_minibatch(self: nn.Module, *args, **kwargs) -> tuple:
    given = _parameters.bind(self, *args, **kwargs).arguments
    state = given.get("random_state")
    tensors = [value for value in given["sentence_feature"].values() if isinstance(value, Tensor)]
    writes = sum(map(writes_to, tensors))
    if state is not None and state in _firsts:
        first = _firsts[state]
        again = _Pass(iter(first.found), texts_changed=writes != first.writes)
        with setting(_pass, again), torch.autocast(**first.autocast):
            return _stock_embed(self, *args, **kwargs)
    if state is not None or current_options() is None:
        return _stock_embed(self, *args, **kwargs)
    sentence_transformers_joint.check_metric(self)
    first = _First(autocast_in_force(tensors[0].device.type), writes)
    with setting(_pass, _Pass(first.found)):
        *embedded, state = _stock_embed(self, *args, **kwargs)
    if state is not None:
        _firsts[state] = first
        if _on_gpu(tensors[0]):
            _advise(self, given["sentence_feature"], first.found)
    return *embedded, state


def _advise(loss: nn.Module, features: dict[str, object], found: list[object]) -> None:
    """Say how to fill mini-batches that keep a GPU waiting, of which stock's default of 32 texts is one."""
    packed = next((each for each in found if isinstance(each, Documents)), None)
    # Queries are short, and divided as documents are.
    if packed is None or "packed" not in found or features.get("task") == "query":
        return
    is_part = loss.mini_batch_num_tokens is None and len(packed) < len(features["input_ids"])
    if is_part and len(packed.token_index) < _FEW_TOKENS:
        log_once(_FEW, loss.mini_batch_size, loss.mini_batch_size, about=loss.model)


def _on_gpu(tensor: Tensor) -> bool:
    return tensor.is_cuda
