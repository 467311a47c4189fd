"""Context variables."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

Value = TypeVar("Value")


@contextmanager
def setting(variable: ContextVar[Value], value: Value) -> Iterator[None]:
    """Give a variable a value for the length of a block."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
