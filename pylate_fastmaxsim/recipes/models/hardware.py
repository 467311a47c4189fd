"""What the GPU can compute."""

from __future__ import annotations

import torch


def gpu_has_bf16() -> bool:
    """Whether the GPU computes in bf16. PyTorch also counts older ones, which emulate it more slowly than fp32."""
    return torch.cuda.is_bf16_supported(including_emulation=False)
