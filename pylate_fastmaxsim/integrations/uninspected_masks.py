"""Attention masks that transformers makes without looking at their values, which would wait for the GPU once a step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from pylate_fastmaxsim.integrations.patching import Patch
from pylate_fastmaxsim.integrations.redirection import detached

try:
    from transformers import masking_utils
except ImportError:  # transformers before 4.53
    masking_utils = None

_NAME = "_ignore_bidirectional_mask_sdpa"
_stock = detached(getattr(masking_utils, _NAME, None))
_uninspected: ContextVar[bool] = ContextVar("uninspected", default=False)


def patches() -> list[Patch]:
    """What to replace in transformers; nothing in versions that decide otherwise."""
    return [] if _stock is None else [Patch(masking_utils, _NAME, can_leave_out)]


def can_leave_out(padding_mask: Tensor | None, *args, **kwargs) -> bool:
    """Whether attention may go without a mask, as transformers has it; False inside :func:`uninspected`.

    A mask that leaves nothing out changes no result. That a query is padded is the rule, so that to look would gain
    nothing, and the GPU would idle while the host launches what comes next.
    """
    if not torch.compiler.is_compiling() and _uninspected.get() and padding_mask is not None and padding_mask.is_cuda:
        return False
    return _stock(padding_mask, *args, **kwargs)


@contextmanager
def uninspected() -> Iterator[None]:
    """Within this, no mask on a GPU is looked at."""
    token = _uninspected.set(True)
    try:
        yield
    finally:
        _uninspected.reset(token)
