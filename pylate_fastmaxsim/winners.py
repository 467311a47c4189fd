"""How the operators store which document token won for a query token."""

import torch


def winner_dtype(max_d_length: int) -> torch.dtype:
    """Smallest integer type that holds a token's position in its document, and one value more for "none"."""
    if max_d_length <= 255:
        return torch.uint8
    return torch.int16 if max_d_length <= 32767 else torch.int32


def no_winner(dtype: torch.dtype) -> int:
    """The value of :func:`winner_dtype` that stands for "none"."""
    return 255 if dtype == torch.uint8 else -1
