"""Rank the documents of a collection by exact search, write the ranking, and measure it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from datasets import Dataset
from torch import Tensor

from pylate_fastmaxsim.compressed import CompressedBatch
from pylate_fastmaxsim.files.replace import replace_file
from pylate_fastmaxsim.pooling import Max, Pooling
from pylate_fastmaxsim.recipes.compression import compressor, needs_codec, sampled, train_codec
from pylate_fastmaxsim.recipes.data.collection import (
    IDS_AT_ONCE,
    PAGES,
    Collection,
    document_texts,
    is_of_pages,
    is_the_query,
    titles,
)
from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.models.retriever import BATCHES_AT_ONCE, Encoded, Retriever
from pylate_fastmaxsim.reporting.progress import Progress
from pylate_fastmaxsim.sparse import SparseBatch

METRICS = ("ndcg@10", "mrr@10", "recall@100")
DEPTH = 100  # ranks that the metrics look at
UNJUDGED = -1  # the number of a document without a grade
TAG = "fastmaxsim"  # of a run file

# The scores of the best documents of each query, best first, by their ids.
Ranking = dict[str, dict[str, float]]

SPARSITY = ("flops", "query_nonzeros", "document_nonzeros")


def evaluate_collection(
    model: Retriever,
    collection: Collection,
    batch_size: int,
    pooling: Pooling = Max(),
    corpus_format: str | None = None,
) -> dict[str, float]:
    """nDCG@10, MRR@10 and Recall@100 of exact search, averaged over the judged queries; of sparse vectors also sparsity.

    ``pooling`` and ``corpus_format`` are those of late interaction; a sparse or static model has none.
    """
    found, sparsity = retrieve(model, collection, batch_size, pooling, corpus_format)
    return metrics_of(found, collection) | sparsity.metrics()


def retrieve(
    model: Retriever,
    collection: Collection,
    batch_size: int,
    pooling: Pooling = Max(),
    corpus_format: str | None = None,
) -> tuple[Ranking, Sparsity]:
    """The 100 best documents of each query, and the sparsity of what was searched.

    A document that is the query itself is no result, as in ArguAna and Quora. With ``corpus_format`` documents are
    compressed as they are encoded.
    """
    key, format = f"evaluation.corpus_format {corpus_format}", corpus_format
    if needs_codec(format):
        format = train_codec(key, format, encode_sample(model, collection.corpus, batch_size, "Encoding a sample"))
    queries = model.encode(list(collection.queries.values()), batch_size, is_query=True, show_progress=True)
    documents = map(compressor(key, format), encode_corpus(model, collection.corpus, batch_size, "Searching"))
    sparsity = Sparsity(queries)
    documents = sparsity.counted(documents)
    return ranking(collection, *model.search(queries, documents, DEPTH + 1, pooling), DEPTH), sparsity


def encode_corpus(model: Retriever, corpus: Dataset, batch_size: int, title: str | None = None) -> Iterator[Encoded]:
    """The documents of a corpus, in batches that are encoded as they are asked for; with a title under a progress bar."""
    pages = is_of_pages(corpus)
    # Of pages one batch, because an image takes megabytes.
    with Progress(title or "", len(corpus), unit=" documents", disable=title is None) as progress:
        for rows in corpus.iter(batch_size if pages else BATCHES_AT_ONCE * batch_size):
            batch = model.encode(rows[PAGES] if pages else document_texts(rows), batch_size, is_query=False)
            yield batch
            progress.update(len(batch))


def encode_sample(model: Retriever, corpus: Dataset, batch_size: int, title: str | None = None) -> Iterator[Encoded]:
    """Documents of a corpus that a codec is trained on, as those of :func:`encode_corpus`."""
    return encode_corpus(model, corpus.select(sampled(len(corpus))), batch_size, title)


def ranking(collection: Collection, scores: Tensor, positions: Tensor, depth: int) -> Ranking:
    """The first ``depth`` documents of each query, of ``scores`` and ``positions`` ``[Nq, K]``.

    A position of -1 is no document, as sparse search has where too few share a term with the query. A document that is
    the query itself is left out, so that K should be more than ``depth``.
    """
    # Rows of a data set take 20 times as long to look up.
    ids = collection.corpus.select_columns("_id").with_format("arrow")[:].column("_id").combine_chunks()
    found = {}
    for query, row, values in zip(collection.queries, positions.cpu(), scores.tolist(), strict=True):
        row = row[row >= 0]
        names = map(str, ids.take(pa.array(row.numpy())).to_pylist())
        documents = dict(zip(names, zip(row.tolist(), values, strict=False), strict=True))
        if query in documents:
            rows = collection.corpus[[documents[query][0]]]
            if is_the_query(collection, query, titles(rows)[0], rows["text"][0]):
                del documents[query]
        found[query] = {document: score for document, (_, score) in list(documents.items())[:depth]}
    return found


def write_run(file: Path, found: Ranking) -> None:
    """Write ``query Q0 document rank score tag`` for each result, ranks from 1; the file appears when it is complete.

    Scores have 9 digits, which tells all float32 numbers apart.
    """

    def write(scratch: str) -> None:
        with open(scratch, "w", encoding="utf-8") as lines:
            for query, documents in found.items():
                lines.writelines(
                    f"{query} Q0 {document} {rank} {score:.9g} {TAG}\n"
                    for rank, (document, score) in enumerate(documents.items(), start=1)
                )

    replace_file(file, write)


def require_ids_of_one_word(collection: Collection) -> None:
    """Refuse ids with a space, which a run file cannot hold."""
    ids = collection.corpus.select_columns("_id").iter(IDS_AT_ONCE)
    for name, part in (("query", list(collection.queries)), *(("document", rows["_id"]) for rows in ids)):
        for each in map(str, part):
            if each.split() != [each]:
                raise RecipeError(
                    f"--run: ids must have no white space, which separates the columns of a run file, but {each!r} is that "
                    f"of a {name}."
                )


def metrics_of(found: Ranking, collection: Collection, names: Sequence[str] = METRICS) -> dict[str, float]:
    """Metrics of a ranking by the names that ranx has for them, averaged over the judged queries.

    Of equal scores the order of the ranking counts.
    """
    by_query = metrics_by_query(found, collection, names)
    return {name: float(np.mean(list(by_query[name].values()))) for name in names}


def metrics_by_query(
    found: Ranking, collection: Collection, names: Sequence[str] = METRICS
) -> dict[str, dict[str, float]]:
    """Metrics of each judged query: by the name of the metric, then by the id of the query, in the order of ids."""
    # ranx compiles for seconds when it is imported.
    from ranx import evaluate

    queries = sorted(collection.judgements)
    relevant, ranked = [], []
    for query in queries:
        # The ideal ranking is read off the judgements, so the highest grade comes first.
        grades = sorted(collection.judgements[query].items(), key=lambda judged: -judged[1])
        numbers = {document: number for number, (document, _) in enumerate(grades)}
        relevant.append([(number, grade) for number, (_, grade) in enumerate(grades)])
        ranked.append([(numbers.get(document, UNJUDGED), -rank) for rank, document in enumerate(found.get(query, {}))])
    # Arrays are paired by their rows and taken in the order that they have; ranx sorts its own tables, equal scores at
    # random, and cannot hold a query that finds nothing.
    # Of a single metric ranx cannot return the values of the queries.
    scores = evaluate(_padded(relevant), _padded(ranked), [*names, names[0]], return_mean=False)
    return {name: dict(zip(queries, scores[name].tolist(), strict=True)) for name in names}


def _padded(rows: list[list[tuple[int, int]]]) -> np.ndarray:
    """Rows of (document, score) as one array ``[N, K, 2]`` (float64), filled up with documents that are not judged."""
    padded = np.zeros((len(rows), max(1, *map(len, rows)), 2))
    padded[..., 0] = UNJUDGED
    for place, row in enumerate(rows):
        padded[place, : len(row)] = np.array(row).reshape(-1, 2)
    return padded


class Sparsity:
    """FLOPS and the mean numbers of non-zeros of sparse queries and of the documents searched; nothing of token embeddings.

    FLOPS is the mean number of products in the score of a query and a document: the sum over the vocabulary of how often
    a term is in a query times how often it is in a document (https://arxiv.org/abs/2107.05720).
    """

    def __init__(self, queries: Encoded) -> None:
        self._queries = queries if isinstance(queries, SparseBatch) else None
        self._texts = 0
        self._counts = 0 if self._queries is None else torch.zeros(queries.vocabulary, dtype=torch.int64)

    def counted(self, documents: Iterable[Encoded | CompressedBatch]) -> Iterator[Encoded | CompressedBatch]:
        """Count batches of documents as they go by."""
        for batch in documents:
            if self._queries is not None:
                self._texts += len(batch)
                self._counts += _texts_with_terms(batch)
            yield batch

    def metrics(self) -> dict[str, float]:
        """The values of SPARSITY, once all documents have gone by."""
        if self._queries is None:
            return {}
        queries = _texts_with_terms(self._queries).double() / max(1, len(self._queries))
        documents = self._counts.double() / max(1, self._texts)
        return dict(zip(SPARSITY, map(float, (queries @ documents, queries.sum(), documents.sum())), strict=True))


def _texts_with_terms(batch: SparseBatch) -> Tensor:
    """In how many vectors of a batch each term of the vocabulary is not zero."""
    return torch.bincount(batch.terms.long(), minlength=batch.vocabulary).cpu()
