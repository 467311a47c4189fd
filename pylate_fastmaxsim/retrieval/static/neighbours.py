"""Which query tokens are similar enough to each document token, and from which similarity on, without a V x V matrix."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

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
    """For each document token the query tokens that it matches, back to back."""

    offsets: Tensor  # [V + 1], int64
    terms: Tensor  # query tokens, ascending, [E], int32
    weights: Tensor  # above 0, [E], float32

    @cached_property
    def sizes(self) -> Tensor:
        """Entries of each document token, ``[V]``, int64, on the CPU."""
        return self.offsets.diff().cpu()


def token_thresholds(query_vectors: Tensor, document_vectors: Tensor, threshold: float, cap: int | None) -> Tensor:
    """The similarity of each query token that a document token must exceed, ``[V]``, float64.

    ``threshold``, or with a ``cap`` a larger one, if needed, that at most so many document tokens exceed. Of the
    threshold -inf it is less than all similarities and less than 0, which is what a document without tokens has.
    """
    thresholds = query_vectors.new_full((len(query_vectors),), threshold, dtype=torch.float64)
    if threshold != -torch.inf and (cap is None or cap >= len(document_vectors)):
        return thresholds
    for begin, similarities in _similarities(query_vectors, document_vectors):
        part = thresholds[begin : begin + len(similarities)]
        if threshold == -torch.inf:
            smallest = similarities.amin(dim=1).clamp(max=0)
            part.copy_(smallest - BELOW_ALL * (1 - smallest))
        if cap is not None and cap < len(document_vectors):
            # Rounded up to float32, well beyond what float64 may round differently elsewhere.
            reached = similarities.topk(cap + 1, dim=1).values[:, -1].float()
            torch.maximum(part, reached.nextafter(torch.full_like(reached, torch.inf)).double(), out=part)
    return thresholds


def neighbours_above(query_vectors: Tensor, document_vectors: Tensor, thresholds: Tensor) -> Neighbours | None:
    """Pairs of tokens whose similarity exceeds the query token's threshold, with what it exceeds it by.

    None if they are so many that the product of tables and documents is cheaper.
    """
    # Of a small vocabulary a token matches at least itself.
    largest = min(LARGEST_TABLE, int(LARGEST_SHARE * len(thresholds) ** 2) + len(thresholds))
    parts = []
    for begin, similarities in _similarities(query_vectors, document_vectors):
        excess = (similarities - thresholds[begin : begin + len(similarities), None]).float()
        parts.append(_entries(begin, excess, excess > 0))
        if sum(len(part[0]) for part in parts) > largest:
            return None
    return _table(parts, len(document_vectors))


def neighbours_at_least(
    query_vectors: Tensor, document_vectors: Tensor, threshold: float, above: Tensor
) -> Neighbours | None:
    """Pairs of tokens with a similarity of at least ``threshold`` that exceeds ``above [V]``, with the similarity.

    Similarities are rounded to multiples of 2**-20, so that the cosine of a vector with itself is 1. None if there are
    too many.
    """
    parts = []
    for begin, similarities in _similarities(query_vectors, document_vectors):
        kept = similarities > above[begin : begin + len(similarities), None]
        similarities = (similarities * 2**20).round() * 2.0**-20
        parts.append(_entries(begin, similarities.float(), kept & (similarities >= threshold)))
        if sum(len(part[0]) for part in parts) > LARGEST_TABLE:
            return None
    return _table(parts, len(document_vectors))


def equal_tokens(vocabulary: int, device: torch.device) -> Neighbours:
    """Each token matches itself, with the weight 1."""
    numbers = torch.arange(vocabulary + 1, device=device)
    return Neighbours(numbers, numbers[:-1].int(), torch.ones(vocabulary, device=device))


def _similarities(query_vectors: Tensor, document_vectors: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Inner products of some query tokens with all document tokens, ``[R, V]``, float64, and the first query token.

    float64, since rounding then depends neither on the size of a block nor on switches of float32 products.
    """
    transposed = document_vectors.double().T
    rows = max(1, SIMILARITIES_AT_ONCE // max(1, len(document_vectors)))
    for begin in range(0, len(query_vectors), rows):
        yield begin, query_vectors[begin : begin + rows].double() @ transposed


def _entries(begin: int, weights: Tensor, kept: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Query tokens, document tokens and weights of what is kept of a block."""
    rows, columns = kept.nonzero(as_tuple=True)
    return (rows + begin).int(), columns.int(), weights[rows, columns]


def _table(parts: list[tuple[Tensor, Tensor, Tensor]], vocabulary: int) -> Neighbours:
    query_tokens, document_tokens, weights = (torch.cat(each) for each in zip(*parts, strict=True))
    document_tokens, order = document_tokens.sort(stable=True)
    offsets = torch.searchsorted(document_tokens, torch.arange(vocabulary + 1, device=order.device, dtype=torch.int32))
    return Neighbours(offsets, query_tokens[order], weights[order])
