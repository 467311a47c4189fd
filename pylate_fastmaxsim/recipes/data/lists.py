"""Rows with lists of positives and of negatives, made to rows with one text in each column."""

import random
from collections.abc import Iterable
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, Features, Value

from pylate_fastmaxsim.recipes.config.schema import DataSection
from pylate_fastmaxsim.recipes.errors import RecipeError

ROWS_AT_ONCE = 1_000

# Names of the text of a passage, in its keys or in the columns of a collection.
TEXT_KEYS = ("text", "body", "content", "contents", "passage", "passage_text")

# Names of ids, likewise.
ID_KEYS = ("_id", "id", "qid", "pid", "docid", "query_id", "document_id", "doc_id")


def spread_lists(data: DataSection, dataset: Dataset, section: str = "data") -> Dataset:
    """Rows of a query, a positive and equally many negatives, where a positive or negatives stand in lists.

    A list of positives becomes a row for each. All columns behind the positive hold negatives, texts or lists of texts;
    missing texts are none. ``data.negatives_per_query`` of them become a column each. Of more they are drawn,
    always the same with the same ``data.seed``; fewer are repeated. Without that key every row must have as many as the
    first. A text may also be a passage (:func:`~pylate_fastmaxsim.recipes.data.lists.passage_text`), and negatives may
    be lists by the systems that found them, of which ``data.negatives`` are used, or all. Rows of plain texts are
    returned as they are, unless a key asks for some negatives.
    """
    query, *documents = dataset.column_names
    types = dataset.features.arrow_schema
    if is_list(types.field(query).type):
        raise RecipeError(f"{section}.columns: {query!r} is the query and must hold texts, but it holds lists.")
    gaps = any(dataset.data.column(name).null_count for name in documents[1:])
    plain = all(isinstance(dataset.features[name], Value) for name in documents)
    if not documents or (plain and not gaps and not asks_for_negatives(data)):
        return dataset
    spread = Spread(section, data, dataset[0])
    query_name, *names = spread.names()
    features = Features({query_name: dataset.features[query], **dict.fromkeys(names, Value("string"))})
    return dataset.map(
        spread,
        batched=True,
        batch_size=ROWS_AT_ONCE,
        with_indices=True,
        remove_columns=dataset.column_names,
        features=features,
        desc="Reading lists",
    )


def is_list(dtype: pa.DataType) -> bool:
    """Tell whether a column of this type in Arrow holds lists."""
    return pa.types.is_list(dtype) or pa.types.is_large_list(dtype) or pa.types.is_fixed_size_list(dtype)


def asks_for_negatives(data: DataSection) -> bool:
    """Tell whether a key says how many or which negatives are used."""
    return data.negatives_per_query is not None or data.negatives is not None


def list_lengths(column: pa.ChunkedArray, where: str) -> pa.ChunkedArray:
    """The length of each list in a column; 0 for a missing list. The error begins with ``where``."""
    if not is_list(column.type):
        raise RecipeError(f"{where} must hold lists, but it holds {column.type}.")
    return pc.fill_null(pc.list_value_length(column), 0)


def names_of_rows(columns: int) -> list[str]:
    """The columns of triples, as those of MS MARCO and ColBERT."""
    if columns <= 3:
        return ["query", "positive", "negative"][:columns]
    return ["query", "positive", *(f"negative_{number}" for number in range(1, columns - 1))]


class Spread:
    """Turns a batch of rows with lists or passages into columns of one text each; ``first`` is the first row."""

    def __init__(self, section: str, data: DataSection, first: dict[str, Any]) -> None:
        self.section, self.data = section, data
        self.query, self.positive, *self.others = first
        if not self.others and asks_for_negatives(data):
            key = "negatives_per_query" if data.negatives is None else "negatives"
            raise RecipeError(
                f"{section}.{key} needs a column of negatives behind the positive, but the columns are {self.query} and "
                f"{self.positive}."
            )
        for system in data.negatives or ():
            for name in self.others:
                there = list(first[name]) if _by_system(first[name]) else []
                if system not in there:
                    raise RecipeError(
                        f"{section}.negatives must name systems that {name!r} has in the first row "
                        f"({', '.join(there) or 'it has none'}), got {system}."
                    )
        self.given = data.negatives_per_query is not None
        self.count = data.negatives_per_query if self.given else len(self.negatives(0, first))

    def names(self) -> list[str]:
        """The columns of the result."""
        documents = names_of_rows(2 + self.count)[1:]
        return ["query" if self.query in documents else self.query, *documents]

    def negatives(self, number: int, row: dict[str, Any]) -> list[str]:
        """All negatives of the row of this number, those that several systems found once."""
        found = []
        for name in self.others:
            if not _by_system(row[name]):
                found += self._texts(number, name, row[name])
                continue
            lists = [row[name].get(system) for system in self.data.negatives or row[name]]
            found += dict.fromkeys(text for each in lists for text in self._texts(number, name, each))
        return found

    def __call__(self, batch: dict[str, list], numbers: list[int]) -> dict[str, list]:
        rows = []
        for number, values in zip(numbers, zip(*batch.values(), strict=True), strict=True):
            row = dict(zip(batch, values, strict=True))
            positives, negatives = self._texts(number, self.positive, row[self.positive]), self.negatives(number, row)
            if not positives:
                raise RecipeError(f"{self.section}.columns: row {number} has no text in {self.positive!r}.")
            self._check(number, len(negatives))
            rows += [[row[self.query], one, *self._drawn(row[self.query], one, negatives)] for one in positives]
        names = self.names()
        return {name: [row[place] for row in rows] for place, name in enumerate(names)}

    def _check(self, number: int, found: int) -> None:
        if not self.given and found != self.count:
            raise RecipeError(
                f"{self.section}.negatives_per_query is missing, and rows have different numbers of negatives: the first "
                f"has {self.count}, row {number} has {found}."
            )
        if not found and (self.given or self.others):
            raise RecipeError(
                f"{self.section}.negatives_per_query: row {number} has no negative; leave such rows out, or train without "
                "negatives."
            )

    def _drawn(self, query: Any, positive: Any, negatives: list) -> list:
        if len(negatives) > self.count:
            return random.Random(f"{self.data.seed} {query} {positive}").sample(negatives, self.count)
        return [negatives[place % len(negatives)] for place in range(self.count)]

    def _texts(self, number: int, name: str, value: Any) -> list[str]:
        """The texts, or ids as text, of a list or of one; missing and empty ones are left out."""
        ids, where = self.data.collection is not None, f"{name!r} of row {number}"
        values = [
            passage_text(self.section, where, each, self.data.text_key) if isinstance(each, dict) else each
            for each in (value if isinstance(value, list) else [value])
        ]
        values = [each for each in values if each is not None and each != ""]
        for each in values:
            if not isinstance(each, (str, int) if ids else str):
                raise RecipeError(
                    f"{self.section}.columns: {name!r} must hold {'ids' if ids else 'texts'}, but row {number} has {each!r}."
                )
        return list(map(str, values))


def _by_system(value: Any) -> bool:
    """Tell whether negatives are lists by the names of the systems that found them, as in ``{"bm25": [...], "dense": [...]}``."""
    lists = [each for each in value.values() if each is not None] if isinstance(value, dict) else []
    return bool(lists) and all(isinstance(each, list) for each in lists)


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
    >>> from pylate_fastmaxsim.recipes.data.lists import titled
    >>> titled("Bees", "They fly."), titled(None, "They fly.")
    ('Bees They fly.', 'They fly.')
    """
    return f"{title or ''} {text or ''}".strip()
