"""Sparse vectors of documents: for each query token the largest similarity to a token of the document.

A table of neighbours says which query tokens are similar enough to each document token, without a V x V matrix.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from numbers import Real

import torch
from torch import Tensor

from pylate_fastmaxsim.codec import chunks
from pylate_fastmaxsim.retrieval.static.rows import row_maxima
from pylate_fastmaxsim.retrieval.static.tokens import TokenIds
from pylate_fastmaxsim.sparse import SparseBatch, term_dtype

# Weights of some documents for the whole vocabulary that are held at once: 128 MiB, or 256 MiB in float64.
WEIGHTS_AT_ONCE = 1 << 25

# Entries of neighbours that are held at once: up to 600 MiB with their places.
ENTRIES_AT_ONCE = 1 << 24

# Similarities that are held at once: 256 MiB.
SIMILARITIES_AT_ONCE = 1 << 25

# Entries of a table: 1 GiB, and several times that while it is sorted.
LARGEST_TABLE = 1 << 27
# Beyond this share of all pairs a table costs more than the product that it saves.
LARGEST_SHARE = 1 / 8

# How far a threshold lies below the smallest similarity, so that all weights are above 0.
BELOW_ALL = 2.0**-20


@dataclass(frozen=True, eq=False)
class Neighbours:
    """The query tokens that document tokens match, back to back, of the document tokens that have been compared."""

    first: Tensor  # of each document token its first entry, -1: not compared yet, [V], int64
    sizes: Tensor  # and how many it has, [V], int64
    terms: Tensor  # query tokens, of a document token ascending, [E], int32
    weights: Tensor  # above 0, [E], float32

    @classmethod
    def none(cls, vocabulary: int, device: torch.device) -> Neighbours:
        """The table before any document token is compared."""
        sizes = torch.zeros(vocabulary, dtype=torch.int64, device=device)
        return cls(sizes - 1, sizes, sizes[:0].int(), sizes[:0].float())

    def missing(self, tokens: TokenIds) -> Tensor:
        """The document tokens of some texts that are not compared yet, ascending."""
        occurs = torch.zeros_like(self.first, dtype=torch.bool)
        occurs[tokens.ids.long().to(occurs.device)] = True
        return (occurs & (self.first < 0)).nonzero().flatten()

    def plus(self, other: Neighbours | None) -> Neighbours | None:
        """The table of both, which are of different document tokens; None if that is too large, or if the other is."""
        if other is None or len(self.terms) + len(other.terms) > LARGEST_TABLE:
            return None
        return Neighbours(
            self.first.where(other.first < 0, other.first + len(self.terms)),
            self.sizes + other.sizes,
            torch.cat([self.terms, other.terms]),
            torch.cat([self.weights, other.weights]),
        )


def from_neighbours(
    tokens: TokenIds, table: Neighbours, of_empty: Tensor | None, factor: Callable[[Tensor, Tensor], Tensor] | None
) -> SparseBatch:
    """Vectors of documents by a table of what each document token matches.

    ``of_empty``, ``[V]``, are weights of a document without tokens, all 0 by default. ``factor`` is called with counts of
    distinct tokens and the lengths of their documents, and returns what to multiply weights with.
    """
    vocabulary = len(table.sizes)
    batches = []
    for part in _parts(tokens, vocabulary, table.sizes.cpu()):
        lengths = part.lengths.to(table.first.device)
        rows, ids, counts = part.counts(vocabulary, lengths.device)
        first, sizes = table.first[ids], table.sizes[ids]
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
    vocabulary = len(query_vectors)
    batches = []
    for part in _parts(tokens, vocabulary, torch.ones(vocabulary, dtype=torch.int64, device="cpu")):
        dense = query_vectors.new_empty(len(part), vocabulary, dtype=torch.float32)
        for terms, maxima in row_maxima(query_vectors, part, document_vectors):
            dense[:, terms] = (maxima - thresholds[terms]).clamp(min=0)
        batches.append(_sparse(dense))
    return SparseBatch.concatenate(batches)


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
    terms = (places % vocabulary).to(term_dtype(vocabulary))
    return SparseBatch._trusted(offsets, terms, dense[places], vocabulary)


def checked_threshold(
    where: str, threshold: float | str, keep: str, query_vectors: Tensor, document_vectors: Tensor
) -> float:
    """A threshold that similarities of both tables exceed; -inf of ``"lowest"``."""
    number = -torch.inf if threshold == "lowest" else threshold
    if isinstance(number, bool) or not isinstance(number, Real) or number != number:
        raise ValueError(f'{where}: threshold must be a number or "lowest", got {threshold!r}.')
    if keep == "value" and number <= 0:
        raise ValueError(f'{where}: with BM25 or keep="value" the threshold must be above 0, got {number}.')
    largest = math.prod(float(each.norm(dim=1).max()) for each in (query_vectors, document_vectors))
    if keep == "excess" and query_vectors.shape[1] and number > largest - 2.0**-20:
        raise ValueError(
            f"{where}: threshold must be below {largest:.6g}, which only rounding exceeds; equal tokens alone match with "
            f'keep="value", got {number}.'
        )
    return float(number)


def token_thresholds(query_vectors: Tensor, document_vectors: Tensor, threshold: float, cap: int | None) -> Tensor:
    """The similarity of each query token that a document token must exceed, ``[V]``, float64.

    ``threshold``, or with a ``cap`` a larger one, if needed, that at most so many document tokens exceed. Of the
    threshold -inf it is less than all similarities and less than 0, which is what a document without tokens has.
    """
    thresholds = query_vectors.new_full((len(query_vectors),), threshold, dtype=torch.float64)
    if threshold != -torch.inf and (cap is None or cap >= len(document_vectors)):
        return thresholds
    for rows, similarities in _similarities(query_vectors, document_vectors):
        part = thresholds[rows]
        if threshold == -torch.inf:
            smallest = similarities.amin(dim=1).clamp(max=0)
            part.copy_(smallest - BELOW_ALL * (1 - smallest))
        if cap is not None and cap < len(document_vectors):
            # Rounded up to float32, well beyond what float64 may round differently elsewhere.
            reached = similarities.topk(cap + 1, dim=1).values[:, -1].float()
            torch.maximum(part, reached.nextafter(torch.full_like(reached, torch.inf)).double(), out=part)
    return thresholds


def neighbours_above(
    query_vectors: Tensor, document_vectors: Tensor, tokens: Tensor, thresholds: Tensor
) -> Neighbours | None:
    """Pairs with the document ``tokens`` whose similarity exceeds the query token's threshold, with what it exceeds it by.

    None if they are so many that the product of tables and documents is cheaper.
    """

    def excess(rows: slice, similarities: Tensor) -> tuple[Tensor, Tensor]:
        weights = (similarities - thresholds[rows, None]).float()
        return weights, weights > 0

    # Of a small vocabulary a token matches at least itself.
    largest = min(LARGEST_TABLE, int(LARGEST_SHARE * len(thresholds) * len(tokens)) + len(thresholds))
    return _table(query_vectors, document_vectors, tokens, excess, largest)


def neighbours_at_least(
    query_vectors: Tensor, document_vectors: Tensor, tokens: Tensor, threshold: float, above: Tensor, power: float
) -> Neighbours | None:
    """Pairs with the document ``tokens`` with a similarity of at least ``threshold`` that exceeds ``above [V]``.

    Weights are similarities to a power. These are rounded to multiples of 2**-20, so that the cosine of a vector with
    itself is 1. None if there are too many.
    """

    def rounded(rows: slice, similarities: Tensor) -> tuple[Tensor, Tensor]:
        weights = (similarities * 2**20).round() * 2.0**-20
        return (weights**power).float(), (similarities > above[rows, None]) & (weights >= threshold)

    return _table(query_vectors, document_vectors, tokens, rounded, LARGEST_TABLE)


def equal_tokens(vocabulary: int, device: torch.device) -> Neighbours:
    """Each token matches itself, with the weight 1."""
    numbers = torch.arange(vocabulary, device=device)
    return Neighbours(numbers, torch.ones_like(numbers), numbers.int(), torch.ones(vocabulary, device=device))


def _similarities(query_vectors: Tensor, document_vectors: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Some query tokens, and their inner products with all document tokens, ``[R, V]``, float64.

    float64, since rounding then depends neither on the size of a block nor on switches of float32 products.
    """
    transposed = document_vectors.double().T
    for rows in chunks(len(query_vectors), len(document_vectors), SIMILARITIES_AT_ONCE):
        yield rows, query_vectors[rows].double() @ transposed


def _table(
    query_vectors: Tensor,
    document_vectors: Tensor,
    tokens: Tensor,
    weights_of: Callable[[slice, Tensor], tuple[Tensor, Tensor]],
    largest: int,
) -> Neighbours | None:
    """Pairs of tokens of which ``weights_of`` returns the weights and which to keep; None if more than ``largest``."""
    parts, entries = [], 0
    for block, similarities in _similarities(query_vectors, document_vectors[tokens]):
        weights, kept = weights_of(block, similarities)
        rows, columns = kept.nonzero(as_tuple=True)
        parts.append(((rows + block.start).int(), columns.int(), weights[rows, columns]))
        entries += len(rows)
        if entries > largest:
            return None
    query_tokens, document_tokens, weights = (torch.cat(each) for each in zip(*parts, strict=True))
    document_tokens, order = document_tokens.sort(stable=True)
    table = Neighbours.none(len(document_vectors), order.device)
    numbers = torch.arange(len(tokens), device=order.device, dtype=torch.int32)
    table.first[tokens] = torch.searchsorted(document_tokens, numbers)
    table.sizes[tokens] = document_tokens.long().bincount(minlength=len(tokens))
    return Neighbours(table.first, table.sizes, query_tokens[order], weights[order])
