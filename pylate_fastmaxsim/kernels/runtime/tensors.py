"""Tensors in the form in which kernels take them, and their device as the current one."""

import contextlib
from typing import TypeVar

import torch
from torch import Tensor

from pylate_fastmaxsim._operands import CompressedOperands, ScoringOperands, SpladeOperands

Operands = TypeVar("Operands", ScoringOperands, CompressedOperands, SpladeOperands)


def on_device_of(tensor: Tensor):
    # Entering a context costs the host more than asking whether it is needed.
    if not tensor.is_cuda or tensor.device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(tensor.device)


def contiguous(operands: Operands) -> Operands:
    """The operands with contiguous tensors."""
    if all(value.is_contiguous() for value in operands if isinstance(value, Tensor)):
        return operands
    return type(operands)(*(value.contiguous() if isinstance(value, Tensor) else value for value in operands))


def as_bytes(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else mask.contiguous().view(torch.uint8)


def gradient_of(values: Tensor, needed: bool, written: bool) -> Tensor:
    """Memory for the gradient of `values`, of zeros unless the kernel writes every row."""
    if not needed:
        return values.new_empty(0)
    make = torch.empty_like if written else torch.zeros_like
    return make(values, memory_format=torch.contiguous_format)
