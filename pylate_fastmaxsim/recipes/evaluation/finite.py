"""Detect embeddings that are NaN or infinite. Evaluators would sort their scores and report metrics as usual."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from pylate_fastmaxsim.recipes.models.retriever import TextRetriever
from pylate_fastmaxsim.retrieval.static.model import StaticLateInteraction

TEXTS_AT_ONCE = 64  # checked in one call


class NotFiniteError(Exception):
    """A model gave an embedding that is NaN or infinite."""


def require_finite(embeddings: Sequence[Tensor] | Tensor) -> None:
    """Raise :class:`NotFiniteError` where an embedding of these texts or pages is NaN or infinite.

    One sparse tensor holds those of all texts of a sparse model.
    """
    if isinstance(embeddings, Tensor) and embeddings.is_sparse:
        embeddings = [embeddings.coalesce().values()]
    parts = (embeddings[first : first + TEXTS_AT_ONCE] for first in range(0, len(embeddings), TEXTS_AT_ONCE))
    # One result, because each waits for the GPU.
    finite = [torch.cat([embedding.flatten() for embedding in part]).isfinite().all() for part in parts]
    if finite and not torch.stack(finite).all():
        raise NotFiniteError


@contextmanager
def only_finite(model: TextRetriever) -> Iterator[None]:
    """Check what ``model.encode`` returns, also inside PyLate's evaluators."""
    if isinstance(model, StaticLateInteraction):  # whose vectors are finite
        yield
        return
    encode = model.encode

    def checked(*args: Any, **kwargs: Any) -> Any:
        embeddings = encode(*args, **kwargs)
        require_finite(embeddings)
        return embeddings

    model.encode = checked
    try:
        yield
    finally:
        del model.encode  # back to the method of the class
