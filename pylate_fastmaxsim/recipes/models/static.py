"""Texts of a static model, and search in them that returns the documents with the highest MaxSim."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from pylate_fastmaxsim.recipes.errors import RecipeError, first_line
from pylate_fastmaxsim.retrieval.sparse_index import SparseIndex
from pylate_fastmaxsim.retrieval.static.model import StaticLateInteraction
from pylate_fastmaxsim.retrieval.static.tokens import TokenIds
from pylate_fastmaxsim.sparse import SparseBatch


@dataclass(frozen=True, eq=False)
class StaticDocuments:
    """Documents as token ids and as sparse vectors."""

    tokens: TokenIds
    vectors: SparseBatch

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, eq=False)
class StaticQueries:
    """Queries as sparse vectors, with the model that scores them.

    Parameters
    ----------
    model
        With BM25 weights the ranking is that of sparse scores; otherwise that of MaxSim.
    vectors
        Of Nq queries.
    tokens
        Token ids of all documents, if they are known before the search.
    exact
        Whether MaxSim is certified; otherwise the ranking is that of its upper bounds.
    """

    model: StaticLateInteraction
    vectors: SparseBatch
    tokens: TokenIds | None = None
    exact: bool = True

    def __len__(self) -> int:
        return len(self.vectors)

    @property
    def needs_tokens(self) -> bool:
        """Whether a search scores candidates again."""
        return self.exact and self.model.bm25_weights is None

    def search(self, index: SparseIndex, k: int) -> tuple[Tensor, Tensor]:
        """Scores and positions ``[Nq, k]`` of the best documents of an index; -1 where there is none."""
        exact = self.needs_tokens
        return self.model.search(self.vectors, index, k, exact=exact, tokens=self.tokens if exact else None)


def encode_static(
    model: StaticLateInteraction, texts: Sequence[str], is_query: bool
) -> StaticQueries | StaticDocuments:
    """Texts of one side.

    Raises
    ------
    RecipeError
        The model needs counts of tokens that it has not, or its tokenizer gives ids beyond its tables.
    """
    try:
        tokens = model.token_ids(texts)
        return (
            StaticQueries(model, model.queries(tokens))
            if is_query
            else StaticDocuments(tokens, model.documents(tokens))
        )
    except ValueError as error:
        raise RecipeError(f"The static model cannot encode: {first_line(error)}") from error


def search_static(queries: StaticQueries, documents: Iterable[StaticDocuments], k: int) -> tuple[Tensor, Tensor]:
    """Scores and positions ``[Nq, k]`` of the best of a stream of documents, all of which are held in memory."""
    tokens: list[TokenIds] = []

    def vectors() -> Iterator[SparseBatch]:
        for batch in documents:
            if queries.needs_tokens:
                tokens.append(batch.tokens)
            yield batch.vectors

    index = SparseIndex.build(vectors())
    return replace(queries, tokens=TokenIds.concatenate(tokens)).search(index, k)
