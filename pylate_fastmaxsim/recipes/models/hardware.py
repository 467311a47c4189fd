"""What the GPU can compute."""

from __future__ import annotations

import torch


def gpu_has_bf16() -> bool:
    """Whether the GPU computes in bf16. An older one emulates it, slower than fp32, which PyTorch counts by default."""
    return torch.cuda.is_bf16_supported(including_emulation=False)
