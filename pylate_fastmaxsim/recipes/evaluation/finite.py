"""Embeddings that are NaN or infinite, of which evaluators make metrics like any: a sort takes them in some order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from pylate.models import ColBERT
from torch import Tensor

TEXTS_AT_ONCE = 64  # looked at together, so that there is neither a call for each nor a copy of all


class NotFiniteError(Exception):
    """A model gave an embedding that is NaN or infinite."""


def require_finite(embeddings: Sequence[Tensor]) -> None:
    """Raise :class:`NotFiniteError` where an embedding of these texts or pages is NaN or infinite."""
    parts = (embeddings[first : first + TEXTS_AT_ONCE] for first in range(0, len(embeddings), TEXTS_AT_ONCE))
    # One answer, since a GPU is waited for at each.
    finite = [torch.cat([embedding.flatten() for embedding in part]).isfinite().all() for part in parts]
    if finite and not torch.stack(finite).all():
        raise NotFiniteError


@contextmanager
def only_finite(model: ColBERT) -> Iterator[None]:
    """Have ``model.encode`` look at what it gives, whoever calls it: PyLate's evaluators keep it to themselves."""
    encode = model.encode

    def checked(*args: Any, **kwargs: Any) -> Any:
        embeddings = encode(*args, **kwargs)
        require_finite(embeddings)
        return embeddings

    model.encode = checked
    try:
        yield
    finally:
        del model.encode  # which is the method of its class again
