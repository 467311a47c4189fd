"""Rows of ids whose texts stand in other tables.

The texts stay on disk. Ids are turned into row numbers once, in a table that ``datasets`` caches, and a batch reads its
own texts from memory-mapped files.
"""

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, Features, Value
from datasets import Sequence as List
from datasets.fingerprint import Hasher

from pylate_fastmaxsim.recipes.config.schema import DataSection
from pylate_fastmaxsim.recipes.data.lists import is_list, list_lengths, titled
from pylate_fastmaxsim.recipes.data.tables import has_plain_files, is_text, load_subset, require_texts, require_utf8
from pylate_fastmaxsim.recipes.errors import RecipeError

NOT_CAST = (pa.ArrowInvalid, pa.ArrowNotImplementedError)

# Batches are large because the ids of all documents are hashed again for each.
ROWS_PER_LOOKUP = 200_000

SCORES = "scores"

# The subsets of the layout, their id column and the columns they must have.
COLUMNS = {
    "train": ("query_id", "document_ids", "scores"),
    "queries": ("query_id", "text"),
    "documents": ("document_id", "text"),
}


@dataclass(frozen=True)
class TextTable:
    """Texts by id: a table with the columns ``ids``, text and perhaps title. Errors name ``key`` and ``place``."""

    key: str
    place: str
    ids: str
    table: Dataset

    def __post_init__(self) -> None:
        require_texts(f"{self.key}: 'text' of {self.place}", self.table, "text")

    @cached_property
    def known(self) -> pa.ChunkedArray:
        """All ids, as text, each of which stands for one text.

        The whole table is read here, so that the result is cached and later runs do not read it again.
        """
        ids = self.table.select_columns([self.ids]).with_format("arrow")[:][self.ids]
        ids, texts = as_text(ids, f"{self.key}: {self.ids!r} of {self.place}"), self.table.data.column("text")
        require_utf8(f"{self.key}: 'text' of {self.place}", texts)
        _require_one_text_each(self, ids, texts)
        return ids


def look_up(
    data: DataSection,
    rows: Dataset,
    key: str,
    place: str,
    names: Sequence[str],
    queries: TextTable | None,
    documents: TextTable,
) -> Dataset:
    """Rows with texts in place of ids.

    The columns of ``rows`` are a query, documents and perhaps scores, with ids or lists of ids; the result has ``names``
    for them, of which ``scores`` holds scores. Without ``queries`` the first column holds texts. ``data.n_ways`` documents
    and scores of each list are used, the first ones; if it is null, as many as the shortest has. Errors call the rows ``key`` and ``place``.
    """
    n_ways = number_of_ways(data, rows, key, place) if SCORES in names else None
    tables = [queries, *[documents] * (len(names) - 1)]
    tables = {name: table for name, table in zip(names, tables, strict=True) if table is not None and name != SCORES}
    features = {}
    for column, name in zip(rows.column_names, names, strict=True):
        feature = Value("int64") if name in tables else Value("float32") if name == SCORES else rows.features[column]
        features[name] = List(feature) if is_list(rows.features.arrow_schema.field(column).type) else feature
    parts = [rows._fingerprint, *(table.table._fingerprint for table in tables.values()), names, n_ways, 5]

    def resolve(batch: pa.Table) -> pa.Table:
        columns = {}
        for column, name in zip(batch.column_names, names, strict=True):
            values, where = batch[column], f"{key}: {column!r} of {place}"
            nested = is_list(values.type)
            if nested:
                values = pc.list_flatten(pc.list_slice(values, 0, n_ways))
            if name in tables:
                values = _row_numbers(where, values, tables[name])
            elif name == SCORES:
                values = _finite(where, values)
            if nested:
                ends = pa.array(range(0, len(values) + 1, n_ways), pa.int32())
                values = pa.ListArray.from_arrays(ends, values.combine_chunks())
            columns[name] = values
        return pa.table(columns)

    numbers = rows.with_format("arrow").map(
        resolve,
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
            rows = self.tables[name][[row for rows in batch[name] for row in rows] if nested else batch[name]]
            flat = list(map(titled, rows["title"], rows["text"])) if "title" in rows else rows["text"]
            ends = iter(flat)
            texts[name] = [[next(ends) for _ in rows] for rows in batch[name]] if nested else flat
        return texts


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


def _row_numbers(where: str, ids: pa.ChunkedArray, table: TextTable) -> pa.ChunkedArray:
    ids = as_text(ids, where)
    rows = pc.index_in(ids, value_set=table.known)
    if rows.null_count:
        missing = ids[pc.index(pc.is_null(rows), True).as_py()]
        raise RecipeError(f"{where} has {missing}, which is not in {table.place}.")
    return pc.cast(rows, pa.int64())


def _finite(where: str, scores: pa.ChunkedArray) -> pa.ChunkedArray:
    try:
        scores = pc.cast(scores, pa.float32())
    except NOT_CAST:
        raise RecipeError(f"{where} must be numbers, but some {scores.type} are none.") from None
    if scores.null_count or not pc.all(pc.is_finite(scores)).as_py():
        raise RecipeError(f"{where} must be finite numbers, but some are missing, nan or infinite.")
    return scores


def load_distillation(data: DataSection) -> Dataset:
    """Rows with the columns ``query`` (text), ``documents`` (n texts) and ``scores`` (n numbers).

    The first ``data.n_ways`` documents of each row are used, as in ``pylate.utils.KDProcessing``.
    """
    if data.split not in (None, "train") and has_plain_files(data.name):
        raise RecipeError(
            f"data.split must be train for {data.name}, a folder with one file for each subset, got {data.split!r}."
        )
    train, queries, documents = (
        load_subset("data.name", data.name, name, columns, data.split or "train") for name, columns in COLUMNS.items()
    )
    tables = [
        TextTable("data.name", f"the subset {subset}", COLUMNS[subset][0], table.select_columns(list(COLUMNS[subset])))
        for subset, table in (("queries", queries), ("documents", documents))
    ]
    train = train.select_columns(list(COLUMNS["train"]))
    # Some data sets of this layout have lists written as text.
    features = {"document_ids": List(Value("string")), "scores": List(Value("float64"))}
    if written := {name: features[name] for name in features if is_text(train, name)}:
        features, columns = Features(train.features | written), list(written)
        train = train.map(_parse, fn_kwargs={"columns": columns}, features=features, desc="Reading lists")
    return look_up(data, train, "data.name", "the subset train", ("query", "documents", SCORES), *tables)


def _parse(row: dict[str, Any], columns: list[str]) -> dict[str, list]:
    parsed = {}
    for name in columns:
        convert, wanted = (str, "ids") if name == "document_ids" else (float, "numbers")
        try:
            values = ast.literal_eval(row[name])
            if not isinstance(values, (list, tuple)):
                raise ValueError
            parsed[name] = [None if value is None else convert(value) for value in values]
        except (ValueError, TypeError, SyntaxError):
            raise RecipeError(
                f"data.name: {name!r} of the subset train is text, which is not a list of {wanted} in the row of query_id "
                f"{row['query_id']}."
            ) from None
    return parsed


def number_of_ways(data: DataSection, train: Dataset, key: str, place: str) -> int:
    """The number of documents of each row that are used; refuses rows that have fewer.

    The columns of ``train`` are an id of the query, documents and scores; ``key`` and ``place`` are what errors call it.
    """
    query, documents, scores = train.column_names
    if not len(train):
        raise RecipeError(f"{key}: there are no rows in {place}.")
    lengths = [list_lengths(train.data.column(name), f"{key}: {name!r} of {place}") for name in (documents, scores)]
    uneven = pc.index(pc.not_equal(*lengths), True).as_py()
    if uneven >= 0:
        raise RecipeError(
            f"{key}: the row of {query} {train[uneven][query]} has {lengths[0][uneven]} {documents} "
            f"but {lengths[1][uneven]} {scores}; it must have a score for each."
        )
    shortest = pc.min(lengths[0]).as_py()
    if shortest < max(2, data.n_ways or 2):
        row = pc.index(lengths[0], shortest).as_py()
        raise RecipeError(
            f"data.n_ways must be at most the number of documents of every row and at least 2, but the row of {query} "
            f"{train[row][query]} has {shortest}."
        )
    return data.n_ways or shortest
