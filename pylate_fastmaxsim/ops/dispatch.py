"""Which tensors the Triton kernels take; blocked PyTorch computes the rest."""

from __future__ import annotations

import functools
import importlib
import logging
from types import ModuleType

import torch
from torch import Tensor

logger = logging.getLogger("pylate_fastmaxsim")

KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def runs_kernels(values: Tensor) -> bool:
    """Whether the Triton kernels take such values."""
    return values.is_cuda and values.dtype in KERNEL_DTYPES and has_kernels(values.device)


def path(name: str, blocked: ModuleType, values: Tensor) -> ModuleType:
    """The module that computes an operator of such values: of its kernels, or ``blocked`` PyTorch."""
    return kernels(name) if runs_kernels(values) else blocked


@functools.cache
def kernels(name: str) -> ModuleType:
    """The module that launches the kernels of this folder; imported late, since it needs Triton."""
    return importlib.import_module(f"pylate_fastmaxsim.kernels.{name}.launch")


@functools.cache
def has_kernels(device: torch.device) -> bool:
    """Whether Triton kernels run on a CUDA device. Logs a warning once if they do not."""
    if torch.version.cuda is None or torch.cuda.get_device_capability(device) < (8, 0):
        logger.warning(
            "maxsim: the kernels need an NVIDIA GPU of compute capability 8.0 or newer; tensors on %s (%s) are scored by "
            "blocked PyTorch.",
            device,
            torch.cuda.get_device_name(device),
        )
        return False
    return _has_triton()


@functools.cache
def _has_triton() -> bool:
    try:
        importlib.import_module("pylate_fastmaxsim.kernels.maxsim.launch")
    except ImportError as error:
        logger.warning("maxsim: Triton cannot be imported (%s); CUDA tensors are scored by blocked PyTorch.", error)
        return False
    return True
