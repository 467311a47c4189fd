"""The error of a recipe that cannot be run, and what other libraries' errors say."""

from collections.abc import Iterator
from contextlib import contextmanager

from pylate_fastmaxsim._memory import is_out_of_memory


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
def as_recipe_error(
    where: str, types: tuple[type[Exception], ...] = (ValueError,), named: bool = False
) -> Iterator[None]:
    """Context in which errors of these types become RecipeErrors that begin with ``where``, and the type if ``named``."""
    try:
        yield
    except RecipeError:
        raise
    except types as error:
        kind = f"{type(error).__name__}: " if named else ""
        raise RecipeError(f"{where}: {kind}{first_line(error)}") from error


@contextmanager
def within_memory(key: str, size: int, advice: str) -> Iterator[None]:
    """Context in which an error that memory is full becomes a RecipeError about ``key``, a size of batches."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise RecipeError(f"{key} of {size} is more than fits into memory; {advice}.") from error
