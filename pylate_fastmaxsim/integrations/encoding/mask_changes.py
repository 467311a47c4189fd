"""Whether a model changes which tokens its texts have, as one does that learns to prune tokens.

PyLate's Contrastive and Distillation look at ids and masks behind the model; the losses here look before it. So a model
that changes them is found out in its first batch, and its losses then stay PyLate's own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pylate_fastmaxsim.integrations.models.wrappers import unwrap

_MASKS = ("input_ids", "attention_mask")

# What the first batch of each loss showed, in training and in evaluation, with gradients and without.
_changes: WeakKeyDictionary[nn.Module, dict[tuple[bool, bool], bool]] = WeakKeyDictionary()

# Of each, the tensor and how often it had been written to.
Masks = dict[str, tuple[Tensor, int]]


class MasksChanged(Exception):
    """A model left other ids or another mask in what it was given. ``dim`` is the size of its embeddings."""

    def __init__(self, dim: int = 0) -> None:
        self.dim = dim


@torch.compiler.disable
def changes_masks(loss: nn.Module) -> bool | None:
    """Whether the model of a loss changes masks, in training or in evaluation as it is now; None before a batch."""
    return _changes.get(loss, {}).get(_phase(loss))


@torch.compiler.disable
def settle(loss: nn.Module, here: bool, device: torch.device, group: dist.ProcessGroup | None) -> None:
    """Decide from the first batch of a loss whether its model changes masks, for all ranks of ``group`` alike.

    Parameters
    ----------
    here
        Whether it did so now, on this rank.

    Raises
    ------
    MasksChanged
        It does, on one of the ranks.
    ValueError
        It did not in the first batch, and does now.
    """
    if changes_masks(loss) is None:
        anywhere = torch.tensor(int(here), device=device)
        if group:
            dist.all_reduce(anywhere, dist.ReduceOp.MAX, group)
        _changes.setdefault(loss, {})[_phase(loss)] = bool(anywhere)
        if anywhere:
            raise MasksChanged
    elif here:
        raise ValueError(
            "The model changes input_ids or attention_mask now, and did not in its first batch, so that "
            f"{type(loss).__name__} would score other tokens than PyLate's. Have the model change them from the first "
            "batch on, or call pylate_fastmaxsim.disable() and enable() where that begins."
        )


def _phase(loss: nn.Module) -> tuple[bool, bool]:
    # One rank may validate without the others, and must not settle for them what they train with.
    return unwrap(loss.model).training, torch.is_grad_enabled()


def forget() -> None:
    """Settle it anew for every loss."""
    _changes.clear()


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

    That waits for no device, and ranks find the same whatever is in their texts. The same memory in another tensor, as
    DeepSpeed's hooks leave it, is no change.

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
