"""Checks of arguments that search and corpora share."""

from collections.abc import Iterable

from torch import Tensor

from pylate_fastmaxsim.tokens import TokenBatch


def require_batches(where: str, name: str, value: object, kind: type = TokenBatch) -> None:
    """Raise TypeError unless the argument ``name`` of ``where`` is an iterable, and not a single batch."""
    one = "one " if isinstance(value, (kind, Tensor)) else ""
    if one or not isinstance(value, Iterable):
        raise TypeError(
            f"{where}: {name} must be batches of documents, as a list of {kind.__name__}, got {one}{type(value).__name__}."
        )
