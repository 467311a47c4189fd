"""Held-out rows of pages as a collection."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

from datasets import Dataset, Features, Value
from datasets import Image as ImageFeature
from PIL import Image

from pylate_fastmaxsim.recipes.evaluation.beir import PAGES, Collection


def collection_of_pages(held_out: Dataset) -> Collection:
    """The held-out queries over all held-out pages, which are the column ``image`` of the corpus.

    Equal images are one page, and equal texts are one query, for which the pages of all its rows are relevant.
    """
    query_column, page_column, *_ = held_out.column_names
    texts: dict[str, str] = {}
    pages: dict[str, dict[str, Any]] = {}
    relevant: dict[str, dict[str, int]] = {}
    # As they are stored, because an image that is encoded again may lose.
    stored = held_out.select_columns(page_column).with_format("arrow").iter(1)
    for number, (row, files) in enumerate(zip(held_out, stored, strict=True)):
        own, files = (each if isinstance(each, list) else [each] for each in (row[page_column], files[0][0].as_py()))
        names = [_name(page) for page in own]
        pages |= dict(zip(names, files, strict=True))
        query = texts.setdefault(row[query_column], f"q{number}")
        relevant.setdefault(query, {}).update(dict.fromkeys(names, 1))
    corpus = {"_id": list(pages), PAGES: list(pages.values())}
    features = Features({"_id": Value("string"), PAGES: ImageFeature()})
    queries = {query: text for text, query in texts.items()}
    return Collection(Dataset.from_dict(corpus, features=features), queries, relevant)


def _name(page: Image.Image) -> str:
    return sha256(repr((page.mode, page.size)).encode() + page.tobytes()).hexdigest()
