"""Keep transformers from reading attention masks on a GPU, which would wait for it in every step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from pylate_fastmaxsim.integrations.patching.patches import Patch
from pylate_fastmaxsim.integrations.patching.redirect import detached

try:
    from transformers import masking_utils
except ImportError:  # transformers before 4.53
    masking_utils = None

_uninspected: ContextVar[bool] = ContextVar("uninspected", default=False)


def _or_uninspected(stock: Callable[..., bool]) -> Callable[..., bool]:
    def can_leave_out(padding_mask: Tensor | None, *args, **kwargs) -> bool:
        """Whether attention may go without a mask. False inside :func:`uninspected`, for masks on a GPU.

        A mask that masks nothing changes no result, and queries are usually padded.
        """
        on_gpu = padding_mask is not None and padding_mask.is_cuda
        if on_gpu and _uninspected.get() and not torch.compiler.is_compiling():
            return False
        return stock(padding_mask, *args, **kwargs)

    return can_leave_out


# For encoders and for decoders. The replacement calls a copy of the original.
_replacements = {
    name: _or_uninspected(detached(getattr(masking_utils, name)))
    for name in ("_ignore_bidirectional_mask_sdpa", "_ignore_causal_mask_sdpa")
    if hasattr(masking_utils, name)
}


def patches() -> list[Patch]:
    """What to replace in transformers, if the version has these functions."""
    return [Patch(masking_utils, name, replacement) for name, replacement in _replacements.items()]


@contextmanager
def uninspected() -> Iterator[None]:
    """Context in which transformers reads no mask on a GPU."""
    token = _uninspected.set(True)
    try:
        yield
    finally:
        _uninspected.reset(token)
