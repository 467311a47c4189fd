"""What the mask of a row of many texts looks like."""

from __future__ import annotations

import torch
from torch import Tensor


def is_packed_mask(attention_mask: object) -> bool:
    """Whether a mask is one of :mod:`~pylate_fastmaxsim.integrations.encoding.attention`: a real mask is never int32."""
    return isinstance(attention_mask, Tensor) and attention_mask.dtype == torch.int32 and attention_mask.dim() == 4
