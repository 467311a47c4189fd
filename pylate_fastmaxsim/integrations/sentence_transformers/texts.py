"""Texts that a model of Sentence Transformers encodes, in batches of tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from pylate_fastmaxsim.integrations.inference.batches import MOST_TEXTS, Features, Made, embedded_batches
from pylate_fastmaxsim.integrations.inference.tokenizing import faster
from pylate_fastmaxsim.integrations.models.wrappers import group_in_step
from pylate_fastmaxsim.integrations.patching.fallback import FallbackToHost

# Where a model may say how many tokens it takes of a document, or of any text.
_LENGTHS = ("document_length", "max_seq_length")
# Of one that does not say.
_LONGEST = 512


def text_batches(
    model: nn.Module,
    inputs: list,
    embed: Callable[[Features], Made],
    device: torch.device,
    batch_size: int,
    progress: str | None,
    most_texts: int = MOST_TEXTS,
    **options: Any,
) -> Iterator[tuple[list[int], Made]]:
    """:func:`~pylate_fastmaxsim.integrations.inference.batches.embedded_batches` of texts on a device.

    ``options`` are those that the model's ``preprocess`` takes. Raises FallbackToHost for other
    inputs than texts, and for models that several processes have to call together.
    """
    if not all(isinstance(text, str) for text in inputs):
        raise FallbackToHost("an input is not a text")
    if group_in_step(model) is not None:
        raise FallbackToHost("processes have to call the model together")
    longest = next(filter(None, (getattr(model[0], name, None) for name in _LENGTHS)), _LONGEST)
    return embedded_batches(
        inputs,
        faster(model, partial(type(model).preprocess, **options), inputs),
        embed,
        text_length=len,
        device=device,
        batch_size=batch_size,
        longest=longest,
        progress=progress,
        most_texts=most_texts,
        fixed_width=options.get("task") == "query",
    )
