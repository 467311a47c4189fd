"""Autocast for the second pass of GradCache, as it was in the first."""

from __future__ import annotations

import torch


def autocast_in_force(device: str) -> dict[str, object]:
    """Arguments of ``torch.autocast`` that restore its present state for a type of device.

    GradCache's second pass runs inside ``backward()``, which training loops call outside of autocast.

    Examples
    --------
    >>> with torch.autocast("cpu", torch.bfloat16):
    ...     first = autocast_in_force("cpu")
    >>> with torch.autocast(**first):
    ...     torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    (True, torch.bfloat16)
    """
    return {
        "device_type": device,
        "dtype": torch.get_autocast_dtype(device),
        "enabled": torch.is_autocast_enabled(device),
        # Up to PyTorch 2.10 a backward inside autocast would reuse the weights that the first pass cast without gradients.
        "cache_enabled": False,
    }
