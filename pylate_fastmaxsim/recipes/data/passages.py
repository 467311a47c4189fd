"""Passages as objects: which key holds the text, with the title before it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pylate_fastmaxsim.recipes.errors import RecipeError

# Names of the text of a passage, in its keys or in the columns of a collection.
TEXT_KEYS = ("text", "body", "content", "contents", "passage", "passage_text")

# Names of ids, likewise.
ID_KEYS = ("_id", "id", "qid", "pid", "docid", "query_id", "document_id", "doc_id")


def text_key_of(keys: Iterable[str], text_key: str | None = None) -> str | None:
    """The one of ``keys`` that holds the text: ``text_key`` if it is given, otherwise ``text`` or the only known one.

    None if there is none, or if several could be.
    """
    known = [key for key in ([text_key] if text_key else TEXT_KEYS) if key in keys]
    return known[0] if len(known) == 1 or "text" in known else None


def passage_text(section: str, where: str, passage: dict[str, Any], text_key: str | None) -> str:
    """The text of a passage with its title before it; empty if it has neither.

    A key whose value is None counts as missing, because Arrow gives all passages of a list the keys of each.
    """
    given = {key: value for key, value in passage.items() if value is not None}
    key = text_key_of(given, text_key)
    if key is None and given:
        others = [key for key in given if key not in ("title", *ID_KEYS)]
        if others or text_key_of(passage, text_key) is None:
            got, known = (f", got {text_key}", [text_key]) if text_key else ("", TEXT_KEYS)
            raise RecipeError(
                f"{section}.text_key must name the key that holds the text of a passage{got}: {where} has the keys "
                f"{', '.join(given)}, of which {'several are' if {*known} & {*given} else 'none is'} among {', '.join(known)}."
            )
    title, text = None if key == "title" else given.get("title"), given.get(key)
    for each in (title, text):
        if not isinstance(each, (str, type(None))):
            raise RecipeError(f"{section}.columns: text and title must be texts, but {where} has {each!r}.")
    return titled(title, text)


def titled(title: str | None, text: str | None) -> str:
    """A text with its title before it.

    Examples
    --------
    >>> from pylate_fastmaxsim.recipes.data.passages import titled
    >>> titled("Bees", "They fly."), titled(None, "They fly.")
    ('Bees They fly.', 'They fly.')
    """
    return f"{title or ''} {text or ''}".strip()
