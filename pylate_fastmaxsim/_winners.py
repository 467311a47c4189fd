"""Storage of the document tokens that won for each query token, and the memory that takes."""

import torch

_AT_ONCE_BYTES = 2**29
# A float32 score, its quotient by a temperature, its log-softmax and their gradient.
_BYTES_OF_A_SCORE = 16


def winner_dtype(max_d_length: int) -> torch.dtype:
    """Smallest integer dtype for a token's position in its document and one more value, for no winner."""
    if max_d_length <= 255:
        return torch.uint8
    return torch.int16 if max_d_length <= 32767 else torch.int32


def no_winner(dtype: torch.dtype) -> int:
    """The value of a :func:`winner_dtype` that means no winner."""
    return 255 if dtype == torch.uint8 else -1


def queries_at_once(q_length: int, num_documents: int, state_bytes: int) -> int:
    """Number of queries to score at a time, at least 1, so that their share of memory stays bounded.

    That is the state for the backward, scores, their softmax and its gradient. ``state_bytes`` is that of each query
    token and document: of MaxSim the size of a winner.

    Examples
    --------
    >>> queries_at_once(q_length=32, num_documents=8192, state_bytes=2)
    819
    """
    one = num_documents * (q_length * state_bytes + _BYTES_OF_A_SCORE)
    return max(1, _AT_ONCE_BYTES // max(1, one))
