"""Attention masks on the way through a model: it may change them, and transformers need not read them on a GPU.

PyLate's Contrastive and Distillation read ids and masks after the model, the losses here before it. A model that
changes them, as learned token pruning does, is detected in the first batch, and its losses then run as PyLate's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pylate_fastmaxsim.integrations.models.context import setting
from pylate_fastmaxsim.integrations.models.wrappers import least_of_all_ranks, unwrap
from pylate_fastmaxsim.integrations.patching.patches import Patch, detached

try:
    from transformers import masking_utils
except ImportError:  # transformers before 4.53
    masking_utils = None

_MASKS = ("input_ids", "attention_mask")

# For each loss, whether its first batch was changed: in training or evaluation, with gradients or without.
_changes: WeakKeyDictionary[nn.Module, dict[tuple[bool, bool], bool]] = WeakKeyDictionary()


class MasksChanged(Exception):
    """A model changed ids or mask in its features. ``dim`` is the size of its embeddings."""

    def __init__(self, dim: int = 0) -> None:
        self.dim = dim


@torch.compiler.disable
def changes_masks(loss: nn.Module) -> bool | None:
    """Say whether the model of a loss changes masks in its present phase; None before the first batch."""
    return _changes.get(loss, {}).get(_phase(loss))


@torch.compiler.disable
def agree_on_mask_changes(loss: nn.Module, here: bool, device: torch.device, group: dist.ProcessGroup | None) -> None:
    """Decide in the first batch of a loss whether its model changes masks, for all ranks of ``group`` alike.

    Raises MasksChanged if one did on one of them (``here``: on this rank), and ValueError if it does now only.
    """
    if changes_masks(loss) is None:
        anywhere = not least_of_all_ranks(int(not here), device, group) if group else here
        _changes.setdefault(loss, {})[_phase(loss)] = anywhere
        if anywhere:
            raise MasksChanged
    elif here:
        raise ValueError(
            "The model changes input_ids or attention_mask now, and did not in its first batch. "
            f"{type(loss).__name__} would score other tokens than PyLate's. Change them from the first batch on, or call "
            "pylate_fastmaxsim.disable() and enable() before the change begins."
        )


def _phase(loss: nn.Module) -> tuple[bool, bool]:
    # One rank may validate alone, which must not decide about training.
    return unwrap(loss.model).training, torch.is_grad_enabled()


def forget() -> None:
    """Decide anew for every loss."""
    _changes.clear()


def with_copied_masks(features: Sequence[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """Copy the columns to run stock with after :class:`MasksChanged`: a model may write to ids and masks."""
    return [{**column, **{key: column[key].clone() for key in _MASKS}} for column in features]


# Not compiled, as below: dynamo cannot trace the versions of tensors.
@torch.compiler.disable
def masks_of(features: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, int]]:
    """Ids and mask of a column before a call of the model, and their versions."""
    return {key: (features[key], writes_to(features[key])) for key in _MASKS}


@torch.compiler.disable
def changed(features: Mapping[str, Tensor], before: dict[str, tuple[Tensor, int]]) -> bool:
    """Check whether the column holds other tensors now, even equal ones, or these were written to.

    Contents are not compared: that would wait for the device, and ranks could differ. Another tensor with the same
    memory, as DeepSpeed's hooks leave it, is no change.
    """

    def differs(now: Tensor | None, tensor: Tensor, writes: int) -> bool:
        if now is not tensor and (now is None or not now.is_set_to(tensor)):
            return True
        return writes_to(tensor) != writes

    return any(differs(features.get(key), tensor, writes) for key, (tensor, writes) in before.items())


def writes_to(tensor: Tensor) -> int:
    """The version of a tensor, which each write raises. Inference mode has none."""
    return 0 if tensor.is_inference() else tensor._version


_unread: ContextVar[bool] = ContextVar("unread", default=False)


def masks_unread() -> AbstractContextManager[None]:
    """Context in which transformers reads no mask on a GPU, for which the host would wait in every step."""
    return setting(_unread, True)


def _without_reading(stock: Callable[..., bool]) -> Callable[..., bool]:
    def can_leave_out(padding_mask: Tensor | None, *args, **kwargs) -> bool:
        """Say whether attention may go without a mask. False inside :func:`masks_unread`, for masks on a GPU.

        A mask that masks nothing changes no result, and queries are usually padded.
        """
        on_gpu = padding_mask is not None and padding_mask.is_cuda
        if on_gpu and _unread.get() and not torch.compiler.is_compiling():
            return False
        return stock(padding_mask, *args, **kwargs)

    return can_leave_out


# For encoders and for decoders. The replacement calls a copy of the original.
_replacements = {
    name: _without_reading(detached(getattr(masking_utils, name)))
    for name in ("_ignore_bidirectional_mask_sdpa", "_ignore_causal_mask_sdpa")
    if hasattr(masking_utils, name)
}


def patches() -> list[Patch]:
    """Replacements in transformers, if the version has these functions."""
    return [Patch(masking_utils, name, replacement) for name, replacement in _replacements.items()]
