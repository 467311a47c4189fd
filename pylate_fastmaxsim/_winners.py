"""How the operators store which document token won for a query token, and how many queries have room for that."""

import torch

_AT_ONCE_BYTES = 2**29
# A float32 score, its quotient by a temperature, its logarithmic softmax and the gradient of these.
_BYTES_OF_A_SCORE = 16


def winner_dtype(max_d_length: int) -> torch.dtype:
    """Smallest integer type that holds a token's position in its document, and one value more for "none"."""
    if max_d_length <= 255:
        return torch.uint8
    return torch.int16 if max_d_length <= 32767 else torch.int32


def winner_layout(num_slots: int, num_rows: int, max_d_length: int, want: bool) -> tuple[tuple[int, int], torch.dtype]:
    """Shape and dtype of the winners that an operator returns: nothing in them unless wanted.

    The dtype says nothing about lengths then, so that a program that keeps no winners is not bound to lengths of one
    dtype.
    """
    return ((num_slots, num_rows), winner_dtype(max_d_length)) if want else ((0, 0), winner_dtype(0))


def no_winner(dtype: torch.dtype) -> int:
    """The value of :func:`winner_dtype` that stands for "none"."""
    return 255 if dtype == torch.uint8 else -1


def queries_at_once(q_length: int, num_documents: int, max_d_length: int) -> int:
    """How many queries to score at a time where memory is what counts, at least 1.

    Bounds what a launch leaves behind and a loss makes of it: winners, scores, their softmax and their gradient.

    Examples
    --------
    >>> queries_at_once(q_length=32, num_documents=8192, max_d_length=300)
    819
    """
    one = num_documents * (q_length * winner_dtype(max_d_length).itemsize + _BYTES_OF_A_SCORE)
    return max(1, _AT_ONCE_BYTES // max(1, one))
