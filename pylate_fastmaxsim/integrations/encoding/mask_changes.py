"""Whether a model changes which tokens its texts have, as one does that learns to leave tokens out.

Stock's Contrastive and Distillation look at ids and masks behind the model; the losses here, before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from weakref import WeakSet

import torch
from torch import Tensor, nn

_MASKS = ("input_ids", "attention_mask")

# Models that were seen to change masks.
changing: WeakSet[nn.Module] = WeakSet()

# Of each, the tensor and how often it had been written to.
Masks = dict[str, tuple[Tensor, int]]


class MasksChanged(Exception):
    """A model left other ids or another mask in what it was given. ``dim`` is the size of its embeddings."""

    def __init__(self, dim: int) -> None:
        self.dim = dim


def as_given(features: Sequence[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """The columns for whoever goes on with them after :class:`MasksChanged`: a model may write to what it is given."""
    return [{**column, **{key: column[key].clone() for key in _MASKS}} for column in features]


# Outside of what is compiled, as what follows: dynamo cannot trace how often a tensor was written to.
@torch.compiler.disable
def masks_of(features: Mapping[str, Tensor]) -> Masks:
    """Ids and mask of a column before the model is called with it."""
    return {key: (features[key], writes_to(features[key])) for key in _MASKS}


@torch.compiler.disable
def changed(features: Mapping[str, Tensor], before: Masks) -> bool:
    """Whether the column holds other tensors now, even if equal ones, or these were written to.

    That follows what the model does and not what is in its texts, so that all ranks find the same. The same memory in
    another tensor, as DeepSpeed's hooks leave it, is no change.

    Examples
    --------
    >>> column = {"input_ids": torch.ones(1, 2), "attention_mask": torch.ones(1, 2)}
    >>> before = masks_of(column)
    >>> changed(column, before)
    False
    >>> column["attention_mask"][0, 1] = 0
    >>> changed(column, before)
    True
    """
    return any(
        not _same_memory(features.get(key), tensor) or writes_to(tensor) != writes
        for key, (tensor, writes) in before.items()
    )


def _same_memory(now: Tensor | None, tensor: Tensor) -> bool:
    if now is tensor or now is None:
        return now is tensor
    return now.is_set_to(tensor)


def writes_to(tensor: Tensor) -> int:
    """How often a tensor has been written to, which is not counted in inference mode."""
    return 0 if tensor.is_inference() else tensor._version
