"""Texts that a model of Sentence Transformers encodes, in batches of tokens."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from pylate_fastmaxsim.integrations.encoding.inference import Batch, batches
from pylate_fastmaxsim.integrations.encoding.tokenizing import faster
from pylate_fastmaxsim.integrations.models.wrappers import group_in_step
from pylate_fastmaxsim.integrations.patching.fallback import FallbackToHost

# Of a model that does not say how many tokens it takes.
_LONGEST = 512


def text_batches(
    model: nn.Module, inputs: list, device: torch.device, show_progress_bar: bool, what: str, **options: Any
) -> Iterator[Batch]:
    """Batches of texts on a device, as :func:`~pylate_fastmaxsim.integrations.encoding.inference.batches` makes them.

    ``options`` are those of ``batches``, and those that the model's ``preprocess`` takes. Raises FallbackToHost for other
    inputs than texts, and for models that several processes have to call together.
    """
    if not all(isinstance(text, str) for text in inputs):
        raise FallbackToHost("an input is not a text")
    if group_in_step(model) is not None:
        raise FallbackToHost("processes have to call the model together")
    own = {key: options.pop(key) for key in ("batch_size", "most_texts") if key in options}
    tokenize = partial(type(model).preprocess, **options)
    first = model[0]
    longest = (
        getattr(first, f"{options.get('task')}_length", None) or getattr(first, "max_seq_length", None) or _LONGEST
    )
    return batches(
        inputs,
        faster(model, tokenize, inputs),
        text_length=len,
        device=device,
        longest=longest,
        progress=what if show_progress_bar else None,
        **own,
    )
