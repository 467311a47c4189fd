"""What GradCache's second pass over some texts has in common with the first, whichever host makes them."""

from __future__ import annotations

import torch


def autocast_in_force(device: str) -> dict[str, object]:
    """Arguments of ``torch.autocast`` that make it what it is now on a type of device.

    The second pass runs inside ``backward()``, which a training loop calls outside of its autocast context.

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
        # Up to PyTorch 2.10 a backward inside of autocast would be given the weights that the first pass has cast.
        "cache_enabled": False,
    }
