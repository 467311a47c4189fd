"""Distillation data: rows of (query id, document ids, teacher scores), with the texts in two other tables."""

from __future__ import annotations

import ast
from typing import Any

import pyarrow.compute as pc
from datasets import Dataset, Features, Sequence, Value

from pylate_fastmaxsim.recipes.config.schema import DataSection
from pylate_fastmaxsim.recipes.data.ids import ROWS_PER_LOOKUP, TextTable, look_up
from pylate_fastmaxsim.recipes.data.lists import list_lengths
from pylate_fastmaxsim.recipes.data.tables import has_plain_files, load_subset, progress_shown
from pylate_fastmaxsim.recipes.errors import RecipeError

# The subsets of the layout, their id column and the columns they must have.
COLUMNS = {
    "train": ("query_id", "document_ids", "scores"),
    "queries": ("query_id", "text"),
    "documents": ("document_id", "text"),
}


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
    tables = [
        TextTable("data.name", f"the subset {subset}", COLUMNS[subset][0], table.select_columns(list(COLUMNS[subset])))
        for subset, table in (("queries", queries), ("documents", documents))
    ]
    train = _parsed(train.select_columns(list(COLUMNS["train"])))
    place = "the subset train"
    n_ways = number_of_ways(data, train, "data.name", place)
    return look_up(train, "data.name", place, ("query", "documents", "scores"), *tables, n_ways)


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


def number_of_ways(data: DataSection, train: Dataset, key: str, place: str) -> int:
    """How many documents of each row are used; raises RecipeError if a row has fewer.

    The columns of ``train`` are an id of the query, documents and scores; ``key`` and ``place`` are what errors call it.
    """
    query, *lists = train.column_names
    documents, scores = lists
    least = None
    for table in train.with_format("arrow").iter(ROWS_PER_LOOKUP):
        lengths = [list_lengths(table, name, f"{key}: {name!r} of {place}") for name in lists]
        uneven = pc.index(pc.not_equal(*lengths), True).as_py()
        if uneven >= 0:
            raise RecipeError(
                f"{key}: the row of {query} {table[query][uneven]} has {lengths[0][uneven]} {documents} "
                f"but {lengths[1][uneven]} {scores}; it must have a score for each."
            )
        shortest = pc.min(lengths[0]).as_py()
        if shortest < max(2, data.n_ways or 2):
            row = pc.index(lengths[0], shortest).as_py()
            raise RecipeError(
                f"data.n_ways must be at most the number of documents of every row and at least 2, but the row of {query} "
                f"{table[query][row]} has {shortest}."
            )
        least = shortest if least is None else min(least, shortest)
    return data.n_ways or least
