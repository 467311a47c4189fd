"""Rows of ids whose texts stand in other tables.

The texts stay on disk. Ids are turned into row numbers once, in a table that ``datasets`` caches, and a batch reads its
own texts from memory-mapped files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, Features, Value
from datasets import Sequence as List
from datasets.fingerprint import Hasher

from pylate_fastmaxsim.recipes.data.lists import is_list
from pylate_fastmaxsim.recipes.data.passages import titled
from pylate_fastmaxsim.recipes.data.tables import progress_shown, require_texts, require_utf8
from pylate_fastmaxsim.recipes.errors import RecipeError

NOT_CAST = (pa.ArrowInvalid, pa.ArrowNotImplementedError)

# Batches are large because the ids of all documents are hashed again for each.
ROWS_PER_LOOKUP = 200_000

SCORES = "scores"


@dataclass(frozen=True)
class TextTable:
    """Texts by id: a table with the columns ``ids``, text and perhaps title. Errors name ``key`` and ``place``."""

    key: str
    place: str
    ids: str
    table: Dataset

    def __post_init__(self) -> None:
        require_texts(f"{self.key}: 'text' of {self.place}", self.table, "text")

    def known(self) -> pa.ChunkedArray:
        """All ids, as text."""
        ids = self.table.select_columns([self.ids]).with_format("arrow")[:][self.ids]
        return as_text(ids, f"{self.key}: {self.ids!r} of {self.place}")


def look_up(
    rows: Dataset,
    key: str,
    place: str,
    names: Sequence[str],
    queries: TextTable | None,
    documents: TextTable,
    n_ways: int | None = None,
) -> Dataset:
    """Rows with texts in place of ids.

    Parameters
    ----------
    rows
        A query, documents and perhaps scores. A column holds ids, or lists of ids.
    key, place
        What errors call the rows.
    names
        Names of the columns of the result, in their order. The first is that of queries, and one named scores holds
        scores.
    queries
        ``None``: the first column holds texts.
    n_ways
        How many documents and scores of each list are used, the first ones.

    Raises
    ------
    RecipeError
        An id is not in its table, or stands for several texts there. A text is missing or is not UTF-8. A score is no
        finite number.
    """
    tables = [queries, *[documents] * (len(names) - 1)]
    tables = {name: table for name, table in zip(names, tables, strict=True) if table is not None and name != SCORES}
    features = {}
    for column, name in zip(rows.column_names, names, strict=True):
        kind = Value("int64") if name in tables else Value("float32") if name == SCORES else rows.features[column]
        features[name] = List(kind) if is_list(rows.features.arrow_schema.field(column).type) else kind
    parts = [rows._fingerprint, *(table.table._fingerprint for table in tables.values()), names, n_ways, 5]
    with progress_shown():
        numbers = rows.with_format("arrow").map(
            _Resolve(key, place, names, tables, n_ways),
            batched=True,
            batch_size=ROWS_PER_LOOKUP,
            remove_columns=rows.column_names,
            features=Features(features),
            # Made of the tables' fingerprints: hashing the ids in memory would take long.
            new_fingerprint=Hasher.hash(parts),
            desc="Looking up ids",
        )
    return numbers.with_transform(Texts({name: table.table for name, table in tables.items()}))


class Texts:
    """A transform of ``datasets`` that replaces row numbers by the texts of a table, with their titles before them."""

    def __init__(self, tables: dict[str, Dataset]) -> None:
        self.tables = {
            name: table.select_columns([each for each in ("text", "title") if each in table.column_names])
            for name, table in tables.items()
        }

    def __call__(self, batch: dict[str, list]) -> dict[str, list]:
        texts = dict(batch)
        for name in texts.keys() & self.tables.keys():
            nested = isinstance(batch[name][0], list)
            flat = _titled(self.tables[name][[row for rows in batch[name] for row in rows] if nested else batch[name]])
            ends = iter(flat)
            texts[name] = [[next(ends) for _ in rows] for rows in batch[name]] if nested else flat
        return texts


def _titled(rows: dict[str, list]) -> list[str]:
    titles = rows.get("title")
    if titles is None:
        return rows["text"]
    return list(map(titled, titles, rows["text"]))


def as_text(ids: pa.ChunkedArray, where: str) -> pa.ChunkedArray:
    """Ids as text, since an id may be a number in one table and text in another; missing ids are refused."""
    try:
        ids = pc.cast(ids, pa.string())
    except NOT_CAST:
        raise RecipeError(f"{where} must hold ids, but it holds {ids.type}.") from None
    if ids.null_count:
        raise RecipeError(f"{where} must hold ids, but some are missing.")
    return ids


def _require_one_text_each(table: TextTable, ids: pa.ChunkedArray, texts: pa.ChunkedArray) -> None:
    """Refuse an id with several texts: all but the first would be ignored silently."""
    counted = pc.value_counts(ids)
    repeated = counted.field("values").filter(pc.greater(counted.field("counts"), 1))
    if not len(repeated):
        return
    # Only for repeated ids: the texts of a whole corpus fill the memory.
    rows = pc.is_in(ids, value_set=repeated)
    several = pa.table({"id": ids.filter(rows), "text": texts.filter(rows)})
    counts = several.group_by("id").aggregate([("text", "count_distinct")])
    row = pc.index(pc.greater(counts["text_count_distinct"], 1), True).as_py()
    if row >= 0:
        raise RecipeError(
            f"{table.key}: {table.ids!r} of {table.place} must stand for one text each, but {counts['id'][row]} has several."
        )


class _Resolve:
    """Replaces ids by row numbers in a batch of rows in Arrow."""

    def __init__(
        self, key: str, place: str, names: Sequence[str], tables: dict[str, TextTable], n_ways: int | None
    ) -> None:
        self.key = key
        self.place = place
        self.names = names
        self.tables = tables
        self.n_ways = n_ways
        self.known: dict[int, pa.ChunkedArray] = {}

    def __call__(self, batch: pa.Table) -> pa.Table:
        columns = {}
        for column, name in zip(batch.column_names, self.names, strict=True):
            values, where = batch[column], f"{self.key}: {column!r} of {self.place}"
            nested = is_list(values.type)
            if nested:
                values = pc.list_slice(values, 0, self.n_ways) if self.n_ways else values
                lengths = pc.list_value_length(values).combine_chunks()
                values = pc.list_flatten(values)
            if name in self.tables:
                values = self._rows(where, values, self.tables[name])
            elif name == SCORES:
                values = _finite(where, values)
            columns[name] = _lists(values, lengths) if nested else values
        return pa.table(columns)

    def _rows(self, where: str, ids: pa.ChunkedArray, table: TextTable) -> pa.ChunkedArray:
        """The row number (int64) of each id."""
        ids = as_text(ids, where)
        rows = pc.index_in(ids, value_set=self._ids(table))
        if rows.null_count:
            missing = ids[pc.index(pc.is_null(rows), True).as_py()]
            raise RecipeError(f"{where} has {missing}, which is not in {table.place}.")
        return pc.cast(rows, pa.int64())

    def _ids(self, table: TextTable) -> pa.ChunkedArray:
        # The whole corpus is read here, so that the result is cached and later runs do not read it again.
        if id(table) not in self.known:
            ids, texts = table.known(), table.table.data.column("text")
            require_utf8(f"{table.key}: 'text' of {table.place}", texts)
            _require_one_text_each(table, ids, texts)
            self.known[id(table)] = ids
        return self.known[id(table)]


def _finite(where: str, scores: pa.ChunkedArray) -> pa.ChunkedArray:
    try:
        scores = pc.cast(scores, pa.float32())
    except NOT_CAST:
        raise RecipeError(f"{where} must be numbers, but some {scores.type} are none.") from None
    if scores.null_count or not pc.all(pc.is_finite(scores)).as_py():
        raise RecipeError(f"{where} must be finite numbers, but some are missing, nan or infinite.")
    return scores


def _lists(flat: pa.ChunkedArray, lengths: pa.Array) -> pa.Array:
    ends = pc.cast(pc.cumulative_sum(pc.cast(lengths, pa.int64())), pa.int32())
    ends = pa.concat_arrays([pa.array([0], pa.int32()), ends])
    return pa.ListArray.from_arrays(ends, flat.combine_chunks() if isinstance(flat, pa.ChunkedArray) else flat)
