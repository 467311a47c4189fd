"""Distillation data: rows of (query id, document ids, teacher scores), with the texts in two other tables.

The corpus stays on disk. Ids are turned into row numbers once, in a table that ``datasets`` caches, and a batch reads
its own texts from memory-mapped files.
"""

from __future__ import annotations

import ast
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, Features, Sequence, Value
from datasets.fingerprint import Hasher

from pylate_fastmaxsim.recipes.config.schema import DataSection
from pylate_fastmaxsim.recipes.data.tables import (
    has_plain_files,
    load_subset,
    progress_shown,
    require_texts,
    require_utf8,
)
from pylate_fastmaxsim.recipes.errors import RecipeError

# The subsets of the layout, their id column and the columns they must have.
COLUMNS = {
    "train": ("query_id", "document_ids", "scores"),
    "queries": ("query_id", "text"),
    "documents": ("document_id", "text"),
}

NOT_CAST = (pa.ArrowInvalid, pa.ArrowNotImplementedError)

# Batches are large because the ids of all documents are hashed again for each.
ROWS_PER_LOOKUP = 200_000


class Texts:
    """A transform of ``datasets`` that replaces row numbers of queries and documents by their texts."""

    def __init__(self, queries: Dataset, documents: Dataset) -> None:
        self.queries = queries.select_columns(["text"])
        self.documents = documents.select_columns(["text"])

    def __call__(self, batch: dict[str, list]) -> dict[str, list]:
        texts = dict(batch)
        if "query" in batch:
            texts["query"] = self.queries[batch["query"]]["text"]
        if "documents" in batch:
            flat = self.documents[[row for rows in batch["documents"] for row in rows]]["text"]
            ends = iter(flat)
            texts["documents"] = [[next(ends) for _ in rows] for rows in batch["documents"]]
        return texts


def load_distillation(data: DataSection) -> Dataset:
    """Rows with the columns ``query`` (text), ``documents`` (n texts) and ``scores`` (n numbers).

    Parameters
    ----------
    data
        Its ``n_ways`` is how many documents of each row are used: the first ones, as in
        ``pylate.utils.KDProcessing``. Null uses as many as the shortest row has.

    Raises
    ------
    RecipeError
        A column is missing or holds no texts, a row has too few documents or scores, or an id is not in its table or
        stands for several texts there.
    """
    if data.split not in (None, "train") and has_plain_files(data.name):
        raise RecipeError(
            f"data.split must be train for {data.name}, a folder with one file for each subset, got {data.split!r}."
        )
    train, queries, documents = (
        load_subset("data.name", data.name, name, columns, data.split or "train") for name, columns in COLUMNS.items()
    )
    texts = {"queries": queries, "documents": documents}
    for subset, table in texts.items():
        require_texts(f"data.name: 'text' of the subset {subset}", table, "text")
    train = _parsed(train.select_columns(list(COLUMNS["train"])))
    n_ways = _number_of_ways(data, train)
    with progress_shown():
        rows = train.with_format("arrow").map(
            _Resolve(
                {subset: _ids(table, COLUMNS[subset][0], subset) for subset, table in texts.items()}, n_ways, texts
            ),
            batched=True,
            batch_size=ROWS_PER_LOOKUP,
            remove_columns=train.column_names,
            features=Features(
                {"query": Value("int64"), "documents": Sequence(Value("int64")), "scores": Sequence(Value("float32"))}
            ),
            # Made of the tables' fingerprints: hashing the ids in memory would take long.
            new_fingerprint=Hasher.hash([train._fingerprint, queries._fingerprint, documents._fingerprint, n_ways, 4]),
            desc="Looking up document ids",
        )
    return rows.with_transform(Texts(queries, documents))


def _parsed(train: Dataset) -> Dataset:
    """Parse lists that are written as text, as in some data sets of this layout."""
    written = [
        name for name in ("document_ids", "scores") if train.features[name] in (Value("string"), Value("large_string"))
    ]
    if not written:
        return train
    lists = {name: Sequence(Value("string" if name == "document_ids" else "float64")) for name in written}
    with progress_shown():
        return train.map(
            _parse, fn_kwargs={"columns": written}, features=Features({**train.features, **lists}), desc="Reading lists"
        )


def _parse(row: dict[str, Any], columns: list[str]) -> dict[str, list]:
    parsed = {}
    for name in columns:
        kind, wanted = (str, "ids") if name == "document_ids" else (float, "numbers")
        try:
            values = ast.literal_eval(row[name])
            if not isinstance(values, (list, tuple)):
                raise ValueError
            parsed[name] = [None if value is None else kind(value) for value in values]
        except (ValueError, TypeError, SyntaxError):
            raise RecipeError(
                f"data.name: {name!r} of the subset train is text, which is not a list of {wanted} in the row of query_id "
                f"{row['query_id']}."
            ) from None
    return parsed


def _number_of_ways(data: DataSection, train: Dataset) -> int:
    """How many documents of each row are used; raises RecipeError if a row has fewer."""
    least = None
    for table in train.with_format("arrow").iter(ROWS_PER_LOOKUP):
        lengths = [
            list_lengths(table, name, f"data.name: {name!r} of the subset train") for name in ("document_ids", "scores")
        ]
        uneven = pc.index(pc.not_equal(*lengths), True).as_py()
        if uneven >= 0:
            raise RecipeError(
                f"data.name: the row of query_id {table['query_id'][uneven]} has {lengths[0][uneven]} document_ids "
                f"but {lengths[1][uneven]} scores; it must have a score for each."
            )
        shortest = pc.min(lengths[0]).as_py()
        if shortest < max(2, data.n_ways or 2):
            row = pc.index(lengths[0], shortest).as_py()
            raise RecipeError(
                f"data.n_ways must be at most the number of documents of every row and at least 2, but the row of query_id "
                f"{table['query_id'][row]} has {shortest}."
            )
        least = shortest if least is None else min(least, shortest)
    return data.n_ways or least


def list_lengths(table: pa.Table, name: str, where: str) -> pa.ChunkedArray:
    """The length of each list in a column; 0 for a missing list. The error begins with ``where``."""
    kind = table[name].type
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)):
        raise RecipeError(f"{where} must hold lists, but it holds {kind}.")
    return pc.fill_null(pc.list_value_length(table[name]), 0)


def _ids(table: Dataset, column: str, subset: str) -> pa.ChunkedArray:
    return _as_text(table.select_columns([column]).with_format("arrow")[:][column], column, subset)


def _as_text(ids: pa.ChunkedArray, column: str, subset: str) -> pa.ChunkedArray:
    """Ids as text, since an id may be a number in one table and text in another; missing ids are refused."""
    where = f"data.name: {column!r} of the subset {subset}"
    try:
        ids = pc.cast(ids, pa.string())
    except NOT_CAST:
        raise RecipeError(f"{where} must hold ids, but it holds {ids.type}.") from None
    if ids.null_count:
        raise RecipeError(f"{where} must hold ids, but some are missing.")
    return ids


def _require_one_text_each(subset: str, ids: pa.ChunkedArray, texts: pa.ChunkedArray) -> None:
    """Refuse an id with several texts: all but the first would be ignored silently."""
    counted = pc.value_counts(ids)
    repeated = counted.field("values").filter(pc.greater(counted.field("counts"), 1))
    if not len(repeated):
        return
    # Only for repeated ids: the texts of a whole corpus fill the memory.
    rows = pc.is_in(ids, value_set=repeated)
    table = pa.table({"id": ids.filter(rows), "text": texts.filter(rows)})
    counts = table.group_by("id").aggregate([("text", "count_distinct")])
    several = pc.index(pc.greater(counts["text_count_distinct"], 1), True).as_py()
    if several >= 0:
        raise RecipeError(
            f"data.name: {COLUMNS[subset][0]!r} of the subset {subset} must stand for one text each, but "
            f"{counts['id'][several]} has several."
        )


class _Resolve:
    """Replaces ids by row numbers in a batch of rows in Arrow."""

    def __init__(self, ids: dict[str, pa.ChunkedArray], n_ways: int, texts: dict[str, Dataset]) -> None:
        self.ids = ids
        self.n_ways = n_ways
        self.unread = texts

    def __call__(self, table: pa.Table) -> pa.Table:
        # The whole corpus is read here, so that the result is cached and later runs do not read it again.
        while self.unread:
            subset, table_of_texts = self.unread.popitem()
            texts = table_of_texts.data.column("text")
            require_utf8(f"data.name: 'text' of the subset {subset}", texts)
            _require_one_text_each(subset, self.ids[subset], texts)
        first = {name: pc.list_slice(table[name], 0, self.n_ways) for name in ("document_ids", "scores")}
        queries = _rows("query_id", table["query_id"], self.ids["queries"], "queries")
        documents = _rows("document_ids", pc.list_flatten(first["document_ids"]), self.ids["documents"], "documents")
        scores = pc.list_flatten(first["scores"])
        try:
            scores = pc.cast(scores, pa.float32())
        except NOT_CAST:
            raise RecipeError(
                f"data.name: 'scores' of the subset train must be numbers, but some {scores.type} are none."
            ) from None
        if scores.null_count or not pc.all(pc.is_finite(scores)).as_py():
            raise RecipeError(
                "data.name: 'scores' of the subset train must be finite numbers, but some are missing, nan or infinite."
            )
        return pa.table(
            {
                "query": queries,
                "documents": self._lists(documents),
                "scores": self._lists(scores),
            }
        )

    def _lists(self, flat: pa.ChunkedArray) -> pa.Array:
        values = flat.combine_chunks()
        ends = pa.array(range(0, len(values) + 1, self.n_ways), pa.int32())
        return pa.ListArray.from_arrays(ends, values)


def _rows(column: str, ids: pa.ChunkedArray, known: pa.ChunkedArray, subset: str) -> pa.ChunkedArray:
    """The row number (int64) of each id in ``known``."""
    ids = _as_text(ids, column, "train")
    rows = pc.index_in(ids, value_set=known)
    if rows.null_count:
        missing = ids[pc.index(pc.is_null(rows), True).as_py()]
        raise RecipeError(
            f"data.name: {column} of the subset train has {missing}, which is not in the subset {subset}."
        )
    return pc.cast(rows, pa.int64())
