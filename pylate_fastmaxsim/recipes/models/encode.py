"""Texts as ragged batches of token embeddings, for exact search."""

from __future__ import annotations

from collections.abc import Sequence

from pylate.models import ColBERT

from pylate_fastmaxsim.tokens import TokenBatch

# Batches encoded in one call: PyLate sorts the texts of a call by length, so more of them need less padding.
BATCHES_AT_ONCE = 64


def encode(
    model: ColBERT, texts: Sequence[str], batch_size: int, is_query: bool, show_progress: bool = False
) -> TokenBatch:
    """The normalized token embeddings of ``model.encode``, without padding and skipped tokens."""
    embeddings = model.encode(
        list(texts), batch_size=batch_size, is_query=is_query, convert_to_tensor=True, show_progress_bar=show_progress
    )
    return TokenBatch.from_list(embeddings)
