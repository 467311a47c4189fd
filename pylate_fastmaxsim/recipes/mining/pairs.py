"""The distinct texts of (query, positive) pairs and of a corpus, on disk, and which queries have which positives."""

import hashlib
from dataclasses import dataclass

import numpy as np
from datasets import Dataset, Value, concatenate_datasets

from pylate_fastmaxsim.recipes.config.schema import DataSection, MiningSection
from pylate_fastmaxsim.recipes.data.lists import spread_lists
from pylate_fastmaxsim.recipes.data.rows import load_columns
from pylate_fastmaxsim.recipes.data.tables import require_text_columns
from pylate_fastmaxsim.recipes.data.text import names_queries, require_positive_first
from pylate_fastmaxsim.recipes.errors import RecipeError

TEXTS_AT_ONCE = 1000


@dataclass(frozen=True)
class Pairs:
    """Distinct texts, and the pairs by the numbers of their texts."""

    queries: Dataset  # the column ``text``, read from memory-mapped files
    documents: Dataset  # likewise: the positives, then what else is in the corpus
    rows: list[tuple[int, int]]  # the query and the positive of each distinct pair
    digest: str  # the same for the same texts in the same order

    def positives(self) -> list[set[int]]:
        """The documents that are relevant to each query."""
        positives: list[set[int]] = [set() for _ in range(len(self.queries))]
        for query, document in self.rows:
            positives[query].add(document)
        return positives


def load_pairs(section: MiningSection) -> Pairs:
    """Load ``mining.pairs`` and ``mining.corpus``. Equal texts become one query or one document."""
    queries, positives = _load_texts(section.pairs, "mining.pairs", "the query and its positive")
    documents = [positives]
    if section.corpus is not None:
        documents += _load_texts(section.corpus, "mining.corpus", "the text of a document")
    queries, of_query, query_digest = _distinct(queries)
    documents, of_document, document_digest = _distinct(concatenate_datasets(documents))
    rows = list(dict.fromkeys(zip(of_query.tolist(), of_document[: len(positives)].tolist(), strict=True)))
    digest = hashlib.blake2b(query_digest + document_digest + np.array(rows).tobytes(), digest_size=16)
    return Pairs(queries, documents, rows, digest.hexdigest())


def _load_texts(data: DataSection, section: str, wanted: str) -> list[Dataset]:
    """Each column that a section names, as one named ``text``."""
    table = load_columns(data, section)
    names = table.column_names
    if len(names) != (2 if section == "mining.pairs" else 1):
        raise RecipeError(f"{section}.columns must be {wanted}, got {', '.join(names)}.")
    # Without mining.pairs.columns the order is that of the file, and swapped columns would go unnoticed.
    if names_queries(names[-1]) and not names_queries(names[0]):
        raise RecipeError(f"{section}.columns must be {wanted}, in this order, got {', '.join(names)}.")
    if section == "mining.pairs":
        if data.columns is None:
            require_positive_first(section, names[1:], names[0])
        table = spread_lists(data, table, section)
        names = table.column_names
    require_text_columns(table, names, section)
    if data.max_rows is not None:
        table = table.shuffle(seed=data.seed).select(range(min(data.max_rows, len(table))))
    columns = []
    for name in names:
        column = table.select_columns([name])
        if name != "text":
            column = column.rename_column(name, "text")
        # Only columns of one type can be concatenated.
        columns.append(
            column if column.features["text"] == Value("string") else column.cast_column("text", Value("string"))
        )
    return columns


def _distinct(texts: Dataset) -> tuple[Dataset, np.ndarray, bytes]:
    """The distinct texts in order of first occurrence, the number of each row's text, and a digest of the texts."""
    # 16 bytes a text fit into memory for millions.
    digests = b"".join(
        hashlib.blake2b(text.encode(), digest_size=16).digest()
        for batch in texts.iter(TEXTS_AT_ONCE)
        for text in batch["text"]
    )
    unique, first, inverse = np.unique(np.frombuffer(digests, dtype="S16"), return_index=True, return_inverse=True)
    order = first.argsort()
    number = np.empty_like(order)
    number[order] = np.arange(len(order))
    return texts.select(first[order]), number[inverse], hashlib.blake2b(unique[order].tobytes()).digest()
