"""The error of a recipe that cannot be run, and what other libraries' errors say."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class RecipeError(ValueError):
    """A recipe or an option that cannot be run, which any function of recipes may raise.

    The message is one sentence that names the key and what is allowed.
    """

    def __init__(self, sentence: str) -> None:
        # A DataLoader raises an error of its workers again, with their traceback before the sentence.
        super().__init__(sentence.rpartition("RecipeError: ")[2].strip())


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or the name of its type if it has no text."""
    return str(error).strip().partition("\n")[0].rstrip() or type(error).__name__


@contextmanager
def as_recipe_error(where: str, types: tuple[type[Exception], ...] = (ValueError,)) -> Iterator[None]:
    """Context in which errors of these types, ValueError by default, become RecipeErrors that begin with ``where``."""
    try:
        yield
    except RecipeError:
        raise
    except types as error:
        raise RecipeError(f"{where}: {first_line(error)}") from error
