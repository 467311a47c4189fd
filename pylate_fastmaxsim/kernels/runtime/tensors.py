"""Tensors in the form in which kernels take them, and their device as the current one."""

import contextlib

import torch
from torch import Tensor


def on_device_of(tensor: Tensor):
    # To enter a context costs the host more than to ask whether it is needed.
    if not tensor.is_cuda or tensor.device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(tensor.device)


def contiguous(*tensors: Tensor) -> list[Tensor]:
    return [tensor.contiguous() for tensor in tensors]


def as_bytes(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else mask.contiguous().view(torch.uint8)
