"""Attention masks that transformers makes without looking at their values, which would wait for the GPU once a step."""

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
        """Whether attention may go without a mask, as transformers has it; False inside :func:`uninspected`.

        A mask that leaves nothing out changes no result. That a query is padded is the rule, so that to look would gain
        nothing, and the GPU would idle while the host launches what comes next.
        """
        on_gpu = padding_mask is not None and padding_mask.is_cuda
        if on_gpu and _uninspected.get() and not torch.compiler.is_compiling():
            return False
        return stock(padding_mask, *args, **kwargs)

    return can_leave_out


# Of encoders, and of decoders. Each is replaced by what asks the same of a copy of it.
_replacements = {
    name: _or_uninspected(detached(getattr(masking_utils, name)))
    for name in ("_ignore_bidirectional_mask_sdpa", "_ignore_causal_mask_sdpa")
    if hasattr(masking_utils, name)
}


def patches() -> list[Patch]:
    """What to replace in transformers; nothing in versions that decide otherwise."""
    return [Patch(masking_utils, name, replacement) for name, replacement in _replacements.items()]


@contextmanager
def uninspected() -> Iterator[None]:
    """Within this, no mask on a GPU is looked at."""
    token = _uninspected.set(True)
    try:
        yield
    finally:
        _uninspected.reset(token)
