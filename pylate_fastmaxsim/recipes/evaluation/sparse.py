"""How sparse the vectors of a learned-sparse model are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from pylate_fastmaxsim.sparse import SparseBatch

SPARSITY = ("flops", "query_nonzeros", "document_nonzeros")


class TermCounts:
    """In how many of the vectors that were added each term of a vocabulary is not zero."""

    def __init__(self, vocabulary: int) -> None:
        self.texts = 0
        self.counts = torch.zeros(vocabulary, dtype=torch.int64)

    def add(self, batch: SparseBatch) -> TermCounts:
        """Count the vectors of a batch as well."""
        self.texts += len(batch)
        self.counts += torch.bincount(batch.terms.to(torch.int64), minlength=len(self.counts)).cpu()
        return self

    def passing(self, batches: Iterable[SparseBatch]) -> Iterator[SparseBatch]:
        """The same batches, each counted as it goes by."""
        for batch in batches:
            self.add(batch)
            yield batch


def sparsity(queries: TermCounts, documents: TermCounts) -> dict[str, float]:
    """FLOPS and the mean numbers of non-zeros of a query and of a document.

    FLOPS is the mean number of products in the score of a query and a document: the sum over the vocabulary of how often
    a term is in a query times how often it is in a document (https://arxiv.org/abs/2107.05720).

    Examples
    --------
    >>> from pylate_fastmaxsim import SparseBatch
    >>> from pylate_fastmaxsim.recipes.evaluation.sparse import TermCounts, sparsity
    >>> queries = SparseBatch.from_lists([[(0, 1.0), (2, 0.5)], [(2, 1.0)]], 4)
    >>> documents = SparseBatch.from_lists([[(1, 1.0), (2, 2.0), (3, 1.0)]], 4)
    >>> sparsity(TermCounts(4).add(queries), TermCounts(4).add(documents))
    {'flops': 1.0, 'query_nonzeros': 1.5, 'document_nonzeros': 3.0}
    """
    shares = [each.counts.double() / max(1, each.texts) for each in (queries, documents)]
    return dict(zip(SPARSITY, map(float, (shares[0] @ shares[1], *(share.sum() for share in shares))), strict=True))


class Sparsity:
    """:func:`sparsity` of what is searched; nothing of token embeddings."""

    def __init__(self) -> None:
        self._sides: list[TermCounts] = []

    def counted(self, queries: object, documents: Iterable) -> Iterable:
        """The same batches of documents, each counted as it goes by, beside the queries."""
        if not isinstance(queries, SparseBatch):
            return documents
        self._sides = [TermCounts(queries.vocabulary).add(queries), TermCounts(queries.vocabulary)]
        return self._sides[1].passing(documents)

    def metrics(self) -> dict[str, float]:
        """Of the documents that went by."""
        return sparsity(*self._sides) if self._sides else {}
