"""Tensors in the form in which kernels take them, and their device as the current one."""

import contextlib

import torch
from torch import Tensor

from pylate_fastmaxsim.kernels.primitives.live_rows import live_tokens_kernel


def on_device_of(tensor: Tensor):
    # To enter a context costs the host more than to ask whether it is needed.
    if not tensor.is_cuda or tensor.device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(tensor.device)


def contiguous(*tensors: Tensor) -> list[Tensor]:
    return [tensor.contiguous() for tensor in tensors]


def as_bytes(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else mask.contiguous().view(torch.uint8)


def live_tokens_of(starts: Tensor, lengths: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
    """Positions of the live tokens of each sequence, one after the other from its start on, and how many they are."""
    live_tokens = torch.empty(keep.shape, dtype=torch.int32, device=keep.device)
    live_lengths = torch.empty(lengths.shape, dtype=torch.int32, device=lengths.device)
    live_tokens_kernel[(starts.shape[0],)](
        starts, lengths, as_bytes(keep), live_tokens, live_lengths, BLOCK=256, num_warps=2
    )
    return live_tokens, live_lengths
