"""Weights of tokens from counts in a collection: inverse document frequency, and BM25's saturation."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pylate_fastmaxsim.retrieval.static.tokens import TokenIds


@dataclass(frozen=True)
class BM25:
    """BM25's saturation of counts and normalisation by length, for the tokens of documents.

    A token that occurs ``n`` times in a document of ``L`` tokens counts ``n / (n + k1 * (1 - b + b * L / mean))``, where
    ``mean`` is the mean length of the documents that the model was fitted to. Together with the query weights ``"idf"``
    that is BM25 as in Lucene since release 8.

    Parameters
    ----------
    k1
        How late repeated tokens saturate, finite, at least 0.
    b
        How much the length counts, from 0 to 1.

    Examples
    --------
    >>> from pylate_fastmaxsim import BM25
    >>> BM25(k1=0.9, b=0.4)
    BM25(k1=0.9, b=0.4)
    """

    k1: float = 1.5
    b: float = 0.75

    def __post_init__(self) -> None:
        if not 0 <= self.k1 < float("inf"):
            raise ValueError(f"BM25: k1 must be finite and at least 0, got {self.k1}.")
        if not 0 <= self.b <= 1:
            raise ValueError(f"BM25: b must be from 0 to 1, got {self.b}.")

    def of_counts(self, counts: Tensor, lengths: Tensor, mean_length: float) -> Tensor:
        """Weights of tokens that occur ``counts`` times in documents of ``lengths`` tokens, float64."""
        counts = counts.double()
        return counts / (counts + self.k1 * (1 - self.b + self.b * lengths.double() / mean_length))


@dataclass(frozen=True, eq=False)
class Statistics:
    """Counts in a collection."""

    documents: int
    tokens: int
    frequencies: Tensor  # documents that hold each token, [V], int64, on the CPU

    @property
    def mean_length(self) -> float:
        # Where no document has a token, none is divided by it.
        return self.tokens / self.documents if self.tokens else 1.0

    @property
    def idf(self) -> Tensor:
        """Lucene's: ``log(1 + (N - n + 0.5) / (n + 0.5))``, ``[V]``, float64; above 0."""
        frequencies = self.frequencies.double()
        return torch.log1p((self.documents - frequencies + 0.5) / (frequencies + 0.5))

    def plus(self, tokens: TokenIds) -> Statistics:
        rows = torch.repeat_interleave(torch.arange(len(tokens), device="cpu"), tokens.lengths)
        size = len(self.frequencies)
        occurring = (rows * size + tokens.ids).unique() % size
        frequencies = self.frequencies + torch.bincount(occurring, minlength=size)
        return Statistics(self.documents + len(tokens), self.tokens + len(tokens.ids), frequencies)
