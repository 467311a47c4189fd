"""What sums are taken in."""

import torch


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of scores, gradients and norms of vectors of ``dtype``."""
    return torch.float64 if dtype == torch.float64 else torch.float32
