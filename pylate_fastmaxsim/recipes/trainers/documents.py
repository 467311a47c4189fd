"""Rows with lists of documents for the collators of Sentence Transformers, which take a text a column."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn


@dataclass
class EachDocument:
    """A collator of Sentence Transformers that is given each document of a list as a column of its own."""

    collator: Callable[[list[dict[str, Any]]], dict[str, Tensor]]

    @property
    def valid_label_columns(self) -> list[str]:
        """Read by the trainer, for batches without duplicates."""
        return self.collator.valid_label_columns

    def __call__(self, features: list[dict[str, Any]]) -> dict[str, Tensor]:
        return self.collator([spread(row) for row in features])


def spread(row: dict[str, Any]) -> dict[str, Any]:
    """A row with a column for each document of a list; lists of scores stay.

    Examples
    --------
    >>> from pylate_fastmaxsim.recipes.trainers.documents import spread
    >>> spread({"query": "a", "documents": ["b", "c"], "scores": [2.0, 1.0]})
    {'query': 'a', 'documents_0': 'b', 'documents_1': 'c', 'scores': [2.0, 1.0]}
    """
    columns = {}
    for name, value in row.items():
        if isinstance(value, list) and isinstance(value[0], str):
            columns |= {f"{name}_{place}": text for place, text in enumerate(value)}
        else:
            columns[name] = value
    return columns


def sides_of(columns: Iterable[str]) -> dict[str, str]:
    """What each column of a spread row is, ``query`` or ``document``."""
    query, *others = columns
    return {query: "query", **dict.fromkeys(others, "document")}


def prompts_of(model: nn.Module, sides: dict[str, str]) -> dict[str, str]:
    """The prompt of each column, as in the evaluation."""
    return {column: model.prompts[side] for column, side in sides.items() if model.prompts.get(side)}
