"""Static late interaction: MaxSim of models that give a token the same vector everywhere, as sparse vectors."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from pylate_fastmaxsim._checks import require_count
from pylate_fastmaxsim.retrieval.sparse.index import SparseIndex
from pylate_fastmaxsim.retrieval.sparse.search import sparse_search
from pylate_fastmaxsim.retrieval.static import files
from pylate_fastmaxsim.retrieval.static.documents import (
    Neighbours,
    checked_threshold,
    equal_tokens,
    from_maxsim,
    from_neighbours,
    neighbours_above,
    neighbours_at_least,
    token_thresholds,
)
from pylate_fastmaxsim.retrieval.static.rows import rows_search
from pylate_fastmaxsim.retrieval.static.tables import (
    of_model2vec,
    of_static_embedding,
    query_weights_of,
    require_tables,
    scaled_documents,
    token_list,
    unit,
)
from pylate_fastmaxsim.retrieval.static.tokens import (
    BM25,
    Statistics,
    TokenIds,
    are_texts,
    tokens_of,
    without_truncation,
)
from pylate_fastmaxsim.sparse import SparseBatch

Texts = Sequence[str] | TokenIds

# Texts that are tokenized, or documents that are made vectors, at once in a search.
BATCH = 16384


class StaticLateInteraction:
    """A late-interaction model whose tokens have the same vector in every text, as a sparse model.

    A document's weight for a token v of the vocabulary is the largest similarity of v to any of its tokens, and a query's
    weight is how often v occurs in it. The inner product of the two is MaxSim, by which texts are searched. To keep such
    vectors sparse, similarities up to a threshold are cut, and what is stored is by how much they exceed it. The sparse
    score plus :meth:`bound` then is an upper bound of MaxSim; the constant does not change the ranking.

    Similarities are inner products of the float32 vectors in float64, whatever the precision of float32 products is set
    to; a stored weight is rounded to float32 once. Nothing but :meth:`fit` changes a model, so threads may share it.

    Parameters
    ----------
    query_vectors
        Vector of each token in a query, ``[V, d]``, floating point, kept as float32.
    document_vectors
        Vector of each token in a document, ``[V, d]``, of the same device. ``None``: the same as in a query.
    tokenizer
        What makes token ids of texts: of the ``tokenizers`` library, or called as those of Transformers are. No special
        tokens are added, and texts are not truncated. ``None`` if only :class:`TokenIds` are passed.
    threshold
        Similarities up to it are cut. ``"lowest"``: none is; scores equal MaxSim to float32 rounding, and documents have
        an entry for each token of the vocabulary.
    keep
        What a sparse vector stores of a similarity that is not cut: ``"excess"``: by how much it exceeds the threshold;
        ``"value"``: the similarity, from the threshold on, which is above 0. With both :meth:`bound` holds.
    neighbours
        Of how many document tokens at most a query token may exceed its threshold; a token with more gets a higher
        threshold. ``None``: any number.
    query_weights
        What each query token counts: ``None``: 1; ``"idf"``: its inverse document frequency in the collection passed to
        :meth:`fit`; ``"norms"``: the norm of its vector as given, as in model2vec; or a tensor ``[V]``, at least 0 and
        finite. A token of weight 0 is left out.
    document_weights
        What each document token counts: ``None``: 1; a :class:`BM25`, which needs :meth:`fit`; ``"norms"``: its vector
        keeps its norm; or a tensor ``[V]``, at least 0 and finite, which its vector is multiplied with.
    normalize
        Divide each vector by its norm, so that a similarity is a cosine.
    skiplist, query_skiplist
        Token ids that are left out of documents and of queries.

    With :class:`BM25` a stored weight is the similarity itself, or its power, multiplied with the saturation of the
    document's token. With the threshold 1 only equal tokens match, and with ``query_weights="idf"`` the ranking is
    that of BM25. Such scores are no bound of MaxSim.

    Raises
    ------
    ValueError
        A shape, device or number is not as above.
    TypeError
        An argument is of the wrong type.

    Examples
    --------
    >>> import torch
    >>> from pylate_fastmaxsim import StaticLateInteraction
    >>> from pylate_fastmaxsim.retrieval.static.tokens import TokenIds
    >>> vectors = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0]])
    >>> model = StaticLateInteraction(vectors, threshold=0.5)
    >>> documents = TokenIds.from_lists([[0], [2, 2], [1]])
    >>> model.documents(documents).to_scipy().toarray().round(2)
    array([[0.5, 0.3, 0. ],
           [0. , 0.1, 0.5],
           [0.3, 0.5, 0.1]], dtype=float32)
    >>> model.search(TokenIds.from_lists([[0, 0, 2]]), documents, k=2)
    (tensor([[2.2000, 2.0000]]), tensor([[2, 0]]))
    >>> model.search(TokenIds.from_lists([[0, 0, 2]]), model.documents(documents), k=2)
    (tensor([[2.5000, 2.2000]]), tensor([[0, 2]]))
    """

    def __init__(
        self,
        query_vectors: Tensor,
        document_vectors: Tensor | None = None,
        tokenizer: Callable | None = None,
        *,
        threshold: float | str,
        keep: Literal["excess", "value"] = "excess",
        neighbours: int | None = None,
        query_weights: str | Tensor | None = None,
        document_weights: BM25 | str | Tensor | None = None,
        normalize: bool = True,
        skiplist: Iterable[int] = (),
        query_skiplist: Iterable[int] = (),
    ) -> None:
        where = "StaticLateInteraction"
        document_vectors = query_vectors if document_vectors is None else document_vectors
        require_tables(where, query_vectors, document_vectors)
        self.vocabulary, self.device = len(query_vectors), query_vectors.device
        self.tokenizer = without_truncation(tokenizer)
        self.neighbours = None if neighbours is None else require_count(where, "neighbours", neighbours)
        self.bm25_weights = document_weights if isinstance(document_weights, BM25) else None
        if keep not in ("excess", "value"):
            raise ValueError(f'{where}: keep must be "excess" or "value", got {keep!r}.')
        self.keep = keep if self.bm25_weights is None else "value"
        self.skiplist = token_list(where, "skiplist", skiplist, self.vocabulary)
        self.query_skiplist = token_list(where, "query_skiplist", query_skiplist, self.vocabulary)
        self.statistics: Statistics | None = None
        weights = None if self.bm25_weights is not None else document_weights
        with torch.no_grad():
            self.query_vectors = unit(query_vectors) if normalize else query_vectors.float()
            # One table where both are equal.
            same = document_vectors is query_vectors and weights is None
            self.document_vectors = (
                self.query_vectors if same else scaled_documents(where, document_vectors, normalize, weights)
            )
            self.uses_idf = isinstance(query_weights, str) and query_weights == "idf"
            self._query_weights = query_weights_of(where, query_vectors, normalize, query_weights)
            self._set_threshold(where, threshold)

    @classmethod
    def from_static_embedding(cls, module: object, **options: object) -> StaticLateInteraction:
        """The table and tokenizer of a ``StaticEmbedding`` of Sentence Transformers, or of a model that begins with one.

        Of a model that begins with a ``Router`` for queries and documents, both tables. A ``Normalize`` that follows is left
        out; anything else is a TypeError.

        ``options`` are those of the constructor, such as ``threshold``.

        Examples
        --------
        >>> from sentence_transformers.models import StaticEmbedding
        >>> from tokenizers import Tokenizer, models, pre_tokenizers
        >>> tokenizer = Tokenizer(models.WordLevel({"bees": 0, "wasps": 1, "bread": 2}))
        >>> tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        >>> module = StaticEmbedding(tokenizer, embedding_weights=torch.tensor([[2.0, 0.0], [1.6, 1.2], [0.0, 1.0]]))
        >>> model = StaticLateInteraction.from_static_embedding(module, threshold=0.7)
        >>> model.search(["bees"], ["bread", "wasps", "bees bees"], k=2)[1]
        tensor([[2, 1]])
        """
        where = "StaticLateInteraction.from_static_embedding"
        return cls(*of_static_embedding(where, module), **options)

    @classmethod
    def from_model2vec(cls, model: object, **options: object) -> StaticLateInteraction:
        """The vectors and tokenizer of a ``StaticModel`` of model2vec, also of one with a quantized vocabulary.

        As in model2vec, unknown tokens are left out of queries and documents. model2vec keeps the weight of a token as
        the norm of its vector: ``query_weights="norms"`` and ``document_weights="norms"`` use it. ``options`` are those
        of the constructor, such as ``threshold``.
        """
        vectors, unknown = of_model2vec(model)
        for name in ("skiplist", "query_skiplist"):
            options[name] = [*options.get(name, ()), *unknown]
        return cls(vectors, tokenizer=model.tokenizer, **options)

    @classmethod
    def bm25(
        cls, tokenizer: Callable | None, vocabulary: int, k1: float = 1.5, b: float = 0.75
    ) -> StaticLateInteraction:
        """BM25 over the tokens of a tokenizer, without vectors: only equal tokens match. Call :meth:`fit` next.

        Examples
        --------
        >>> from pylate_fastmaxsim import StaticLateInteraction
        >>> from pylate_fastmaxsim.retrieval.static.tokens import TokenIds
        >>> documents = TokenIds.from_lists([[0, 1], [1, 2], [2, 2]])
        >>> model = StaticLateInteraction.bm25(None, vocabulary=3).fit(documents)
        >>> model.search(TokenIds.from_lists([[2]]), documents, k=3)
        (tensor([[0.2686, 0.1880, 0.0000]]), tensor([[ 2,  1, -1]]))
        """
        return cls(
            torch.empty(require_count("StaticLateInteraction.bm25", "vocabulary", vocabulary), 0),
            tokenizer=tokenizer,
            threshold=1.0,
            query_weights="idf",
            document_weights=BM25(k1, b),
        )

    def fit(self, texts: Iterable[Texts] | Texts) -> StaticLateInteraction:
        """Count tokens in a collection, for ``query_weights="idf"`` and :class:`BM25`; returns the model itself.

        Parameters
        ----------
        texts
            All documents: texts, their token ids, or an iterable of batches of either, counted one after the other.
        """
        where = "StaticLateInteraction.fit"
        batches = [texts] if isinstance(texts, TokenIds) or are_texts(texts) else texts
        statistics = Statistics(0, 0, torch.zeros(self.vocabulary, dtype=torch.int64, device="cpu"))
        for batch in batches:
            statistics = statistics.plus(self._document_tokens(where, batch))
        self.statistics = statistics
        return self

    def token_ids(self, texts: Sequence[str]) -> TokenIds:
        """Token ids of texts, without special tokens.

        Raises
        ------
        ValueError
            The model has no tokenizer, or the tokenizer gives a number that is not below V.
        """
        return self._tokens("StaticLateInteraction.token_ids", texts)

    @torch.no_grad()
    def documents(self, texts: Texts) -> SparseBatch:
        """Documents as sparse vectors over the vocabulary, on the device of the tables.

        Parameters
        ----------
        texts
            N texts, or their token ids.

        Returns
        -------
        SparseBatch
            N vectors, float32. A document without tokens has the similarity 0 to each token, as in MaxSim.
        """
        return self._documents(self._document_tokens("StaticLateInteraction.documents", texts))

    def _documents(self, tokens: TokenIds) -> SparseBatch:
        table = self._table_of(tokens)
        if table is None and self.keep == "value":
            raise ValueError(
                'StaticLateInteraction: too many tokens match for BM25 or keep="value"; raise the threshold, or set '
                "neighbours."
            )
        if self.bm25_weights is not None:
            mean_length = self._fitted("BM25").mean_length
            return from_neighbours(tokens, table, None, lambda *each: self.bm25_weights.of_counts(*each, mean_length))
        if table is None:
            return from_maxsim(tokens, self.query_vectors, self.document_vectors, self.thresholds)
        return from_neighbours(tokens, table, (-self.thresholds).clamp(min=0).float(), None)

    @torch.no_grad()
    def queries(self, texts: Texts) -> SparseBatch:
        """Queries as sparse vectors: how often each token occurs, times its weight; on the device of the tables."""
        tokens = self._tokens("StaticLateInteraction.queries", texts).without(self.query_skiplist, self.vocabulary)
        rows, terms, counts = tokens.counts(self.vocabulary)
        weights = counts.double()
        if self.query_weights is not None:
            weights *= self.query_weights[terms]
        where = "StaticLateInteraction.queries"
        return SparseBatch._from_entries(where, rows, terms, weights, len(tokens), self.vocabulary).to(self.device)

    def bound(self, queries: Texts | SparseBatch) -> Tensor:
        """Summands that make the sparse scores of queries upper bounds of MaxSim, ``[Nq]``, float64.

        The sum of the query's tokens' thresholds times their weights. Of the threshold ``"lowest"`` the sum is MaxSim.

        Raises
        ------
        ValueError
            The model's documents have BM25 weights, which bound nothing.
        """
        where = "StaticLateInteraction.bound"
        if self.bm25_weights is not None:
            raise ValueError(f"{where}: scores with BM25 weights are no bounds of MaxSim; make the model without BM25.")
        queries = self._as_queries(where, queries)
        device, queries = queries.device, queries.to("cpu")
        # One after the other, so that a sum depends neither on the device nor on other queries.
        rows = torch.repeat_interleave(torch.arange(len(queries), device="cpu"), queries.offsets.diff())
        weighted = queries.weights.double() * self.thresholds.to("cpu")[queries.terms.long()]
        return torch.bincount(rows, weighted, minlength=len(queries)).to(device)

    @torch.no_grad()
    def search(
        self, queries: Texts | SparseBatch, documents: Texts | SparseBatch | SparseIndex, k: int
    ) -> tuple[Tensor, Tensor]:
        """The ``k`` best documents of each query: by MaxSim, or by sparse scores of documents that are vectors.

        Parameters
        ----------
        queries
            Nq texts, their token ids, or what :meth:`queries` makes of them.
        documents
            Texts or their token ids: the ranking is by MaxSim, exactly, whatever the threshold; with :class:`BM25` by its
            weights. They are read in batches, of which none is kept. What :meth:`documents` makes of texts, or an index
            of that: the ranking is by sparse scores.
        k
            Number of documents to return for each query, at least 1.

        Returns
        -------
        scores
            Best first, ``[Nq, min(k, Nd)]`` for Nd documents, float32: MaxSim; of sparse vectors upper bounds of it,
            sparse scores plus :meth:`bound`, and with BM25 sparse scores. 0 where there is no document.
        positions
            Which document each score is of, ``[Nq, min(k, Nd)]``, int64. Of equal scores the lower position comes first,
            of sparse vectors of equal sparse scores. Among sparse vectors only documents that share a term with the query
            are found, and -1 stands where there is none.

        Raises
        ------
        ValueError
            ``k`` is below 1, vocabularies differ, or a token id is not below V.
        TypeError
            An argument is none of these.
        """
        where = "StaticLateInteraction.search"
        k = require_count(where, "k", k)
        queries = self._as_queries(where, queries)
        if isinstance(documents, SparseIndex):
            scores, positions = documents.search(queries.to(documents.device), k)
        elif isinstance(documents, SparseBatch):
            scores, positions = sparse_search(queries, documents, k)
        elif self.bm25_weights is not None:
            return sparse_search(queries, map(self._documents, self._batches(where, documents)), k)
        else:
            return rows_search(queries, self._batches(where, documents), self.query_vectors, self.document_vectors, k)
        if self.bm25_weights is None:
            scores = (scores.double() + self.bound(queries).to(scores.device)[:, None]).float()
            scores = scores.masked_fill(positions < 0, 0)
        return scores, positions

    def save(self, folder: str | os.PathLike) -> None:
        """Write the model to a folder, in place of a static model that is there.

        Raises
        ------
        ValueError
            The tokenizer has no file format.
        """
        tensors = {"query_vectors": self.query_vectors, "thresholds": self.thresholds}
        if self.document_vectors is not self.query_vectors:
            tensors["document_vectors"] = self.document_vectors
        if self._query_weights is not None:
            tensors["query_weights"] = self._query_weights
        values = {
            "threshold": "lowest" if self.threshold == -torch.inf else self.threshold,
            "keep": self.keep,
            "neighbours": self.neighbours,
            "idf": self.uses_idf,
            "bm25": None if self.bm25_weights is None else asdict(self.bm25_weights),
            "skiplist": self.skiplist,
            "query_skiplist": self.query_skiplist,
        }
        if self.statistics is not None:
            tensors["frequencies"] = self.statistics.frequencies
            values |= {"documents": self.statistics.documents, "tokens": self.statistics.tokens}
        files.write("StaticLateInteraction.save", Path(folder), values, tensors, self.tokenizer)

    @classmethod
    def load(cls, folder: str | os.PathLike, device: str | torch.device = "cpu") -> StaticLateInteraction:
        """Read what :meth:`save` has written.

        Raises
        ------
        ValueError
            The folder holds no static model, or a damaged one.
        """
        values, tensors, tokenizer = files.read("StaticLateInteraction.load", Path(folder))
        model = cls(
            tensors["query_vectors"],
            tensors.get("document_vectors"),
            tokenizer,
            threshold=values["threshold"],
            keep=values.get("keep", "excess"),
            neighbours=values["neighbours"],
            query_weights="idf" if values["idf"] else tensors.get("query_weights"),
            document_weights=None if values["bm25"] is None else BM25(**values["bm25"]),
            normalize=False,
            skiplist=values["skiplist"],
            query_skiplist=values["query_skiplist"],
        )
        model.thresholds = tensors["thresholds"]
        if "frequencies" in tensors:
            model.statistics = Statistics(values["documents"], values["tokens"], tensors["frequencies"])
        return model.to(device)

    def to(self, device: str | torch.device) -> StaticLateInteraction:
        """Copy the model to another device."""
        model = copy.copy(self)
        model.query_vectors = model.document_vectors = self.query_vectors.to(device)
        if self.document_vectors is not self.query_vectors:
            model.document_vectors = self.document_vectors.to(device)
        model.thresholds = self.thresholds.to(device)
        model.device = model.query_vectors.device
        model._reset_table()
        return model

    def with_threshold(self, threshold: float | str) -> StaticLateInteraction:
        """Copy the model with another threshold."""
        model = copy.copy(self)
        model.__dict__.pop("thresholds", None)
        model._set_threshold("StaticLateInteraction.with_threshold", threshold)
        return model

    def _set_threshold(self, where: str, threshold: float | str) -> None:
        self.threshold = checked_threshold(where, threshold, self.keep, self.query_vectors, self.document_vectors)
        self._reset_table()

    @cached_property
    @torch.no_grad()
    def thresholds(self) -> Tensor:
        """The similarity that each query token's matches exceed, ``[V]``, float64."""
        return token_thresholds(self.query_vectors, self.document_vectors, self.threshold, self.neighbours)

    @property
    def query_weights(self) -> Tensor | None:
        """Weight of each query token, ``[V]``, float64, on the CPU; ``None``: 1."""
        return self._fitted("idf").idf if self.uses_idf else self._query_weights

    def _table_of(self, tokens: TokenIds) -> Neighbours | None:
        """The query tokens that each of the document tokens matches; ``None``: so many that MaxSim of all is cheaper."""
        table = self._table
        if table is None or len(missing := table.missing(tokens)) == 0:
            return table
        tables = self.query_vectors, self.document_vectors, missing
        if self.keep == "value":
            above = self.thresholds if self.neighbours is not None else self.thresholds - 1
            power = 1.0 if self.bm25_weights is None else self.bm25_weights.power
            found = neighbours_at_least(*tables, self.threshold, above, power)
        else:
            found = neighbours_above(*tables, self.thresholds)
        # What another thread has added since is compared again when it is needed.
        self._table = table = table.plus(found)
        return table

    def _reset_table(self) -> None:
        if self.query_vectors.shape[1] == 0:
            self._table = equal_tokens(self.vocabulary, self.device)
        elif self.threshold == -torch.inf and self.neighbours is None:
            self._table = None
        else:
            self._table = Neighbours.none(self.vocabulary, self.device)

    def _fitted(self, what: str) -> Statistics:
        if self.statistics is None:
            raise ValueError(
                f"StaticLateInteraction: {what} needs counts of tokens; call fit with all documents first."
            )
        return self.statistics

    def _tokens(self, where: str, texts: Texts) -> TokenIds:
        return tokens_of(where, self.tokenizer, texts, self.vocabulary)

    def _document_tokens(self, where: str, texts: Texts) -> TokenIds:
        return self._tokens(where, texts).without(self.skiplist, self.vocabulary)

    def _as_queries(self, where: str, queries: Texts | SparseBatch) -> SparseBatch:
        if not isinstance(queries, SparseBatch):
            return self.queries(queries)
        if queries.vocabulary != self.vocabulary:
            raise ValueError(f"{where}: queries must have the vocabulary {self.vocabulary}, got {queries.vocabulary}.")
        return queries

    def _batches(self, where: str, documents: Texts) -> Iterator[TokenIds]:
        for begin in range(0, max(1, len(documents)), BATCH):
            if isinstance(documents, TokenIds):
                part = documents.part(begin, min(begin + BATCH, len(documents)))
            else:
                part = documents[begin : begin + BATCH]
            yield self._document_tokens(where, part)
