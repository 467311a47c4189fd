"""Checks of arguments that search and corpora share."""

from collections.abc import Iterable

from torch import Tensor

from pylate_fastmaxsim.tokens import TokenBatch


def require_batches(where: str, name: str, value: object) -> None:
    """Raise TypeError unless the argument ``name`` of ``where`` is an iterable, and not a single batch."""
    one = "one " if isinstance(value, (TokenBatch, Tensor)) else ""
    if one or not isinstance(value, Iterable):
        raise TypeError(
            f"{where}: {name} must be batches of documents, as a list of TokenBatch, got {one}{type(value).__name__}."
        )
