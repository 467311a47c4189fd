"""Checks of arguments that all operators share."""

from __future__ import annotations

import operator

import torch
from torch import Tensor

from pylate_fastmaxsim._tracing import is_plain


def require_tensor(where: str, name: str, value: object, allowed: str) -> None:
    """Raise TypeError unless the argument ``name`` of ``where`` is a tensor; ``allowed`` is its dtype and shape.

    A nested or sparse one is a ValueError.
    """
    if not isinstance(value, Tensor):
        raise TypeError(f"{where}: {name} must be a tensor {allowed}, got {type(value).__name__}.")
    if value.is_nested:
        raise ValueError(
            f"{where}: {name} must be a plain tensor {allowed}, got a nested one; token vectors x of the layout "
            "torch.jagged are TokenBatch.from_packed(x.values(), x.offsets())."
        )
    if value.layout != torch.strided:
        raise ValueError(f"{where}: {name} must be a dense tensor {allowed}, got one of the layout {value.layout}.")


def require_integer(name: str, value: object, allowed: str = "") -> int:
    """The value as a Python integer, also of NumPy's; TypeError if it is none. ``allowed`` is added to the error."""
    if isinstance(value, (int, torch.SymInt)):
        return value
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer{allowed}, got {value!r}.") from None


def require_count(where: str, name: str, value: object) -> int:
    """The argument ``name`` of ``where`` as a Python integer; TypeError or ValueError unless it is at least 1."""
    if isinstance(value, bool):
        raise TypeError(f"{where}: {name} must be an integer, at least 1, got {value!r}.")
    count = require_integer(f"{where}: {name}", value, ", at least 1")
    if count < 1:
        raise ValueError(f"{where}: {name} must be at least 1, got {count}.")
    return count


def has_numbers(*tensors: Tensor) -> bool:
    """Whether the numbers in tensors of one device can be checked without waiting for a GPU."""
    return tensors[0].is_cpu and is_plain(*tensors)


def as_mask(where: str, name: str, mask: Tensor, device: torch.device) -> Tensor:
    """The mask ``name`` of ``where`` as bool on the device; ValueError if it holds other numbers than 0 and 1.

    An additive mask, which is 0 where a token counts, would select all others. Checked on a CPU only.
    """
    if mask.dtype != torch.bool:
        counts = mask != 0
        if has_numbers(mask) and bool((other := counts & (mask != 1)).any()):
            raise ValueError(
                f"{where}: {name} must hold 1 for tokens that count and 0 for others, got {mask[other][0]}."
            )
        mask = counts
    return mask.to(device=device)
