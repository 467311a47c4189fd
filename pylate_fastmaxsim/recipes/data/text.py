"""Columns of texts. PyLate's collator tells queries, documents and scores apart by their names."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, Value
from datasets import Sequence as List

from pylate_fastmaxsim.recipes.config.schema import Recipe
from pylate_fastmaxsim.recipes.data.lists import is_list, list_lengths
from pylate_fastmaxsim.recipes.data.tables import require_text_columns, require_utf8
from pylate_fastmaxsim.recipes.errors import RecipeError

# Read as teacher scores by PyLate's or Sentence Transformers' collator, whatever the loss, or called so in a file.
LABEL_COLUMNS = ("label", "labels", "score", "scores")
COLLATED_LABELS = ("label", "scores")  # by PyLate's

# Words in the names of columns of negatives, and words that may stand beside them, in the singular.
NEGATIVES = {"neg", "negative"}
BESIDE_NEGATIVES = {
    *("hard", "easy", "random", "mined", "sampled", "bm", "dense", "sparse", "lexical", "id", "pid", "docid", "code"),
    *("passage", "document", "doc", "text", "body", "content", "context", "ctx", "answer", "response", "sentence"),
    *("sample", "example", "candidate"),
}


def is_id_column(column: str) -> bool:
    """Tell whether PyLate's collator leaves a column out of the texts."""
    return "_id" in column or column == "dataset_name"


def is_query_column(column: str) -> bool:
    """Tell whether PyLate's collator encodes the texts of a column as queries."""
    return "query" in column or "anchor" in column


def check_first(recipe: Recipe, row: dict[str, Any]) -> None:
    """Refuse rows, by the first as it is in the data, of which other texts or numbers would be trained on than are meant.

    These are columns in another order, columns behind the positive that are no negatives by their names, labels in place
    of texts, and ids without a collection.
    """
    query, *others = row
    if recipe.data.columns is None:
        named = next(filter(names_queries, others), None)
        if named and not names_queries(query):
            raise RecipeError(
                f"data.columns must be given where the data has {query!r} before {named!r}, because the first column is the "
                "query."
            )
        if others:
            require_positive_first("data", others, query)
    labels = [column for column in row if column in LABEL_COLUMNS]
    if labels and recipe.loss.name != "distillation":
        raise RecipeError(
            f"data.columns: {labels[0]!r} is a column of labels or scores, which the {recipe.loss.name} loss does not "
            "take; name only the query, its positive and any negatives, and rename the column if it holds texts."
        )
    if recipe.data.columns is None and others and recipe.loss.name in ("contrastive", "cached_contrastive"):
        require_negatives(others, query)
    if recipe.data.collection is None and all(isinstance(text, str) and text.isdigit() for text in row.values()):
        raise RecipeError(f"data.collection is missing: {query!r} and the other columns hold ids, not texts.")


def check_names(columns: list[str]) -> None:
    """Refuse columns that PyLate's collator would use otherwise."""
    for column in filter(is_id_column, columns):
        raise RecipeError(
            f"data.columns: PyLate's collator leaves out {column!r}, as it does dataset_name and every column with _id "
            "in its name; leave it out as well, or rename it if it holds texts."
        )
    for column in filter(is_query_column, columns[1:]):
        raise RecipeError(
            f"data.columns: PyLate's collator encodes {column!r} as queries, as it does every column with query or anchor "
            "in its name; rename it, or leave it out."
        )


def require_columns_of_loss(recipe: Recipe, columns: list[str], labels: list[str] | None = None) -> None:
    """Refuse columns that the loss does not take, where it is known which are ``labels``."""
    if recipe.loss.name == "distillation":
        if len(columns) != 3 or labels not in (None, columns[2:]):
            raise RecipeError(
                f"data.columns must be [query, documents, scores] for distillation, got [{', '.join(columns)}]."
            )
    elif len(columns) < 2:
        raise RecipeError(
            f"data.columns must be the query, its positive and any negatives, got [{', '.join(columns)}]; "
            + (
                "the file is divided by semicolons: write it with commas or tabs."
                if any(";" in column for column in columns)
                else "a column with _id in its name counts as an id."
            )
        )


def fit_to_loss(recipe: Recipe, dataset: Dataset, labels: Sequence[str]) -> Dataset:
    """Refuse columns that do not fit the loss; those of ``labels`` the collator reads as scores, which become floats."""
    columns = dataset.column_names
    require_columns_of_loss(recipe, columns, [column for column in columns if column in labels])
    if recipe.loss.name == "distillation":
        query, documents, scores = columns
        require_text_columns(dataset, [query], "data")
        require_a_score_each(dataset, documents, scores)
        if "int" in dataset.features[scores].feature.dtype:  # on which PyLate's loss fails
            dataset = dataset.cast_column(scores, List(Value("float32")))
        return dataset
    require_text_columns(dataset, columns, "data")
    return dataset


def count_empty(rows: Dataset) -> int | None:
    """The number of rows with an empty query or document; None of rows whose texts are looked up by id."""
    if rows.format["type"] is not None:
        return None
    empty = np.zeros(len(rows.data), dtype=bool)
    for name in rows.column_names:
        begin = 0
        for chunk in rows.data.column(name).chunks:
            own = np.arange(begin, begin + len(chunk))
            begin += len(chunk)
            if is_list(chunk.type):
                own, chunk = own[pc.list_parent_indices(chunk).to_numpy()], pc.list_flatten(chunk)
            if pa.types.is_string(chunk.type) or pa.types.is_large_string(chunk.type):
                lengths = pc.utf8_length(pc.utf8_trim_whitespace(chunk))
                empty[own[pc.equal(lengths, 0).to_numpy(zero_copy_only=False)]] = True
    return int(empty.sum())


def query_named(dataset: Dataset) -> Dataset:
    """The rows with a name for the first column by which PyLate's collator recognises queries."""
    query, *documents = dataset.column_names
    if is_id_column(query) or is_query_column(query):
        return dataset
    return dataset.rename_column(query, "query") if "query" not in documents else dataset


def names_queries(column: str) -> bool:
    """Tell whether a column is called as one of queries or of their ids."""
    return is_query_column(column.lower()) or "question" in column.lower() or column.lower() == "qid"


def names_negatives(column: str) -> bool:
    """Tell whether a column is called as one of negatives: negative, neg_1, hard_negatives, bm25_negative, negative_passages, ...

    Examples
    --------
    >>> from pylate_fastmaxsim.recipes.data.text import names_negatives
    >>> [names_negatives(column) for column in ("hardNeg1", "negative-2", "negative_scores", "negation", "title")]
    [True, True, False, False, False]
    """
    words = {word.lower().removesuffix("s") for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", column)}
    return bool(words & NEGATIVES) and words <= NEGATIVES | BESIDE_NEGATIVES


def require_positive_first(section: str, documents: list[str], query: str) -> None:
    """Refuse an order of columns in which a negative would be trained as the positive."""
    if not names_negatives(documents[0]):
        return
    positive = next((column for column in documents if "pos" in column.lower()), None)
    if positive is None:
        raise RecipeError(
            f"{section}.columns must be given where the data has {documents[0]!r} in the place of the positive, behind "
            f"{query!r}; the data has the columns {', '.join([query, *documents])}."
        )
    ordered = [query, positive, *(column for column in documents if column != positive)]
    raise RecipeError(
        f"{section}.columns must be given where the data has {documents[0]!r} before {positive!r}, because the first "
        f"column after the query is its positive; for example [{', '.join(ordered)}]."
    )


def require_negatives(documents: list[str], query: str) -> None:
    """Refuse columns behind the positive that are not called as negatives, since they would be trained as such."""
    positive, *behind = documents
    negatives = list(filter(names_negatives, behind))
    others = [column for column in behind if column not in negatives]
    if others:
        likely = next((column for column in (positive, *others) if "pos" in column.lower()), positive)
        raise RecipeError(
            f"data.columns must be given where columns behind the positive are not named as negatives (negative, negative_1, "
            f"neg, hard_negative, ...): found the query {query!r}, the positive {positive!r}, the negatives "
            f"{', '.join(map(repr, negatives)) or 'none'}, and {', '.join(map(repr, others))}; for example "
            f"[{', '.join([query, likely, *negatives])}]."
        )


def require_a_score_each(dataset: Dataset, documents: str, scores: str) -> None:
    """Refuse rows with different numbers of documents and teacher scores, in one row or between rows.

    Every document must be a text and every score a finite number.
    """
    columns = [dataset.data.column(name) for name in (documents, scores)]
    lengths = [
        list_lengths(column, f"data.columns: {name!r}")
        for column, name in zip(columns, (documents, scores), strict=True)
    ]
    ways = max(2, lengths[0][0].as_py())
    row = pc.index(pc.or_(*(pc.not_equal(length, ways) for length in lengths)), True).as_py()
    if row >= 0:
        found = [length[row].as_py() for length in lengths]
        raise RecipeError(
            f"data.columns: every row must have {ways} {documents}{', as the first has,' if row else ''} and a score for "
            f"each, but row {row} has {found[0]} and {found[1]} {scores}."
        )
    _require_values(columns[0], documents, "texts", pa.types.is_string, pa.types.is_large_string)
    _require_values(columns[1], scores, "finite numbers", pa.types.is_integer, pa.types.is_floating)


def _require_values(lists: pa.ChunkedArray, column: str, wanted: str, *allowed: Callable[[pa.DataType], bool]) -> None:
    values = pc.list_flatten(lists)
    if not any(is_of(values.type) for is_of in allowed):
        raise RecipeError(f"data.columns: {column!r} must hold lists of {wanted}, but it holds lists of {values.type}.")
    if values.null_count:
        raise RecipeError(f"data.columns: {column!r} must hold {wanted}, but some are missing.")
    if pa.types.is_floating(values.type) and not pc.all(pc.is_finite(values)).as_py():
        raise RecipeError(f"data.columns: {column!r} must hold {wanted}, but some are nan or infinite.")
    require_utf8(f"data.columns: {column!r}", values)
