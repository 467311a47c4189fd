"""Sparse vectors of documents: for each query token the largest similarity to a token of the document."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from pylate_fastmaxsim.ops.maxsim import maxsim
from pylate_fastmaxsim.retrieval.static.neighbours import Neighbours
from pylate_fastmaxsim.retrieval.static.tokens import TokenIds
from pylate_fastmaxsim.sparse import LARGEST_OF_UINT16, SparseBatch
from pylate_fastmaxsim.tokens import TokenBatch

# Weights of some documents for the whole vocabulary that are held at once: 128 MiB, or 256 MiB in float64.
WEIGHTS_AT_ONCE = 1 << 25

# Entries of neighbours, or numbers of token vectors, that are held at once: up to 600 MiB with their places.
ENTRIES_AT_ONCE = 1 << 24


def from_neighbours(
    tokens: TokenIds, table: Neighbours, of_empty: Tensor | None, factor: Callable[[Tensor, Tensor], Tensor] | None
) -> SparseBatch:
    """Vectors of documents by a table of neighbours.

    Parameters
    ----------
    tokens
        Of N documents.
    table
        What each document token matches, with weights.
    of_empty
        Weights of a document without tokens, ``[V]``, at least 0; ``None``: all 0.
    factor
        Called with counts of distinct tokens and the lengths of their documents; what to multiply weights with.
    """
    vocabulary = len(table.sizes)
    batches = []
    for part in _parts(tokens, vocabulary, table.sizes):
        lengths = part.lengths.to(table.offsets.device)
        rows = torch.repeat_interleave(torch.arange(len(part), device=lengths.device), lengths)
        distinct, counts = (rows * vocabulary + part.ids.to(rows.device)).unique(return_counts=True)
        rows, ids = distinct // vocabulary, distinct % vocabulary
        first = table.offsets[ids]
        sizes = table.offsets[ids + 1] - first
        places = torch.repeat_interleave(first - (sizes.cumsum(0) - sizes), sizes)
        places += torch.arange(len(places), device=places.device)
        weights = table.weights[places]
        if factor is not None:
            weights = (weights * torch.repeat_interleave(factor(counts, lengths[rows]), sizes)).float()
        places = torch.repeat_interleave(rows * vocabulary, sizes) + table.terms[places]
        # A maximum is the same in any order, so that atomic operations are repeatable.
        dense = torch.zeros(len(part) * vocabulary, device=places.device)
        dense = dense.scatter_reduce_(0, places, weights, "amax").view(len(part), vocabulary)
        if of_empty is not None:
            dense[lengths == 0] = of_empty
        batches.append(_sparse(dense))
    return SparseBatch.concatenate(batches)


def from_maxsim(tokens: TokenIds, query_vectors: Tensor, document_vectors: Tensor, thresholds: Tensor) -> SparseBatch:
    """Vectors of documents by MaxSim of all query tokens, less the query tokens' thresholds."""
    vocabulary, dim = query_vectors.shape
    numbers = torch.arange(vocabulary, device=query_vectors.device)
    queries = TokenBatch(query_vectors.double(), numbers, torch.ones_like(numbers), 1, gapless=True)
    batches = []
    for part in _parts(tokens, vocabulary, torch.full((vocabulary,), dim, device="cpu")):
        scores = maxsim(queries, token_vectors(part, document_vectors))
        batches.append(_sparse((scores.T - thresholds).float().clamp(min=0)))
    return SparseBatch.concatenate(batches)


def token_vectors(tokens: TokenIds, vectors: Tensor) -> TokenBatch:
    """The vectors of tokens, float64."""
    ids, offsets = tokens.ids.to(vectors.device), tokens.offsets.to(vectors.device)
    longest = int(tokens.lengths.max()) if len(tokens) else 0
    return TokenBatch.from_packed(vectors[ids].double(), offsets, max_length=longest)


def _parts(tokens: TokenIds, vocabulary: int, costs: Tensor) -> Iterator[TokenIds]:
    if len(tokens) == 0:
        yield tokens
    yield from tokens.parts(max(1, WEIGHTS_AT_ONCE // vocabulary), costs, ENTRIES_AT_ONCE)


def _sparse(dense: Tensor) -> SparseBatch:
    """Numbers ``[N, V]``, at least 0."""
    count, vocabulary = dense.shape
    dense = dense.flatten()
    places = dense.nonzero().squeeze(1)
    offsets = torch.searchsorted(places, torch.arange(count + 1, device=dense.device) * vocabulary)
    terms = (places % vocabulary).to(torch.uint16 if vocabulary <= LARGEST_OF_UINT16 else torch.int32)
    return SparseBatch._trusted(offsets, terms, dense[places], vocabulary)
