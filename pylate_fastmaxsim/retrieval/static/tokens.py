"""Token ids of texts, back to back, how they come from tokenizers, and weights of tokens from counts in a collection."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class TokenIds:
    """Token ids of N texts, stored back to back on the CPU.

    Parameters
    ----------
    ids
        ``[T]``, int32.
    offsets
        First token of each text and the end of the last one, ``[N + 1]``, int64.

    Examples
    --------
    >>> from pylate_fastmaxsim.retrieval.static.tokens import TokenIds
    >>> tokens = TokenIds.from_lists([[5, 7, 5], [], [1]])
    >>> len(tokens), tokens.lengths.tolist(), tokens.part(1, 3).ids.tolist()
    (3, [3, 0, 1], [1])
    """

    ids: Tensor
    offsets: Tensor

    @classmethod
    def from_lists(cls, rows: Iterable[Sequence[int]]) -> TokenIds:
        rows = list(rows)
        lengths = np.fromiter((len(row) for row in rows), np.int64, len(rows))
        ids = np.fromiter((token for row in rows for token in row), np.int32, int(lengths.sum()))
        return cls(torch.from_numpy(ids), torch.from_numpy(np.concatenate([[0], lengths.cumsum()])))

    @classmethod
    def concatenate(cls, parts: Sequence[TokenIds]) -> TokenIds:
        """The texts of all parts, one after the other."""
        lengths = torch.cat([torch.zeros(1, dtype=torch.int64, device="cpu"), *(part.lengths for part in parts)])
        ids = [torch.empty(0, dtype=torch.int32, device="cpu"), *(part.ids for part in parts)]
        return cls(torch.cat(ids), lengths.cumsum(0))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> Tensor:
        """Tokens of each text, ``[N]``, int64."""
        return self.offsets.diff()

    def part(self, begin: int, end: int) -> TokenIds:
        """Texts from ``begin`` to before ``end``, without a copy of their tokens."""
        offsets = self.offsets[begin : end + 1]
        return TokenIds(self.ids[int(offsets[0]) : int(offsets[-1])], offsets - offsets[0])

    def without(self, tokens: Sequence[int], vocabulary: int) -> TokenIds:
        """Leave out some of the tokens, of which there are ``vocabulary``."""
        if not tokens:
            return self
        kept = torch.ones(vocabulary, dtype=torch.bool, device="cpu")
        kept[list(tokens)] = False
        kept = kept[self.ids.long()]
        ends = torch.nn.functional.pad(kept.cumsum(0), (1, 0))
        return TokenIds(self.ids[kept], ends[self.offsets])

    def counts(self, vocabulary: int, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
        """Each text and each of its tokens once, both ascending, and how often it occurs there; all int64, on ``device``."""
        rows = torch.repeat_interleave(torch.arange(len(self), device=device), self.lengths.to(device))
        keys, counts = (rows * vocabulary + self.ids.to(device)).unique(return_counts=True)
        return keys // vocabulary, keys % vocabulary, counts

    def parts(self, texts: int, costs: Tensor, limit: int) -> Iterator[TokenIds]:
        """Cut into parts of at most so many ``texts``, whose tokens cost at most ``limit``, or of one text.

        ``costs [V]``, int64, is what each token costs.
        """
        ends = torch.nn.functional.pad(costs[self.ids.long()].cumsum(0), (1, 0))[self.offsets]
        begin = 0
        while begin < len(self):
            end = int(torch.searchsorted(ends, ends[begin] + limit, right=True)) - 1
            end = min(max(end, begin + 1), begin + texts, len(self))
            yield self.part(begin, end)
            begin = end


def without_truncation(tokenizer: Callable | None) -> Callable | None:
    """A copy of a tokenizer of the ``tokenizers`` library that neither pads nor truncates; another as it is."""
    if hasattr(tokenizer, "encode_batch"):
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.no_padding()
        tokenizer.no_truncation()
    return tokenizer


def tokens_of(where: str, tokenizer: Callable | None, texts: Sequence[str] | TokenIds, vocabulary: int) -> TokenIds:
    """Token ids of texts, without special tokens, or the ids that are given; ValueError if one is not below ``vocabulary``."""
    if isinstance(texts, TokenIds):
        return check_ids(where, texts, vocabulary)
    if not are_texts(texts):
        raise TypeError(f"{where}: texts must be a list of strings, or TokenIds, got {type(texts).__name__}.")
    if tokenizer is None:
        raise ValueError(f"{where}: the model has no tokenizer; pass one, or TokenIds instead of texts.")
    texts = list(texts)
    if hasattr(tokenizer, "encode_batch"):
        rows = [encoding.ids for encoding in tokenizer.encode_batch(texts, add_special_tokens=False)]
    else:
        # An empty list is an error for some tokenizers. Long texts are no reason to warn: nothing limits their length.
        options = {"add_special_tokens": False, "padding": False, "truncation": False, "verbose": False}
        rows = tokenizer(texts, **options)["input_ids"] if texts else []
    return check_ids(where, TokenIds.from_lists(rows), vocabulary)


def are_texts(texts: object) -> bool:
    return isinstance(texts, Sequence) and not isinstance(texts, str) and all(isinstance(text, str) for text in texts)


def check_ids(where: str, tokens: TokenIds, vocabulary: int) -> TokenIds:
    if len(tokens.ids):
        smallest, largest = map(int, torch.aminmax(tokens.ids))
        if smallest < 0 or largest >= vocabulary:
            raise ValueError(
                f"{where}: token ids must be from 0 to {vocabulary - 1}, the rows of the tables, "
                f"got {smallest if smallest < 0 else largest}."
            )
    return tokens


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
    power
        To which power the similarity of a token is taken, finite, above 0. With 2 similar tokens count less beside equal
        ones, whose similarity is 1.

    Examples
    --------
    >>> from pylate_fastmaxsim import BM25
    >>> BM25(k1=0.9, b=0.4)
    BM25(k1=0.9, b=0.4, power=1.0)
    """

    k1: float = 1.5
    b: float = 0.75
    power: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.k1 < float("inf"):
            raise ValueError(f"BM25: k1 must be finite and at least 0, got {self.k1}.")
        if not 0 <= self.b <= 1:
            raise ValueError(f"BM25: b must be from 0 to 1, got {self.b}.")
        if not 0 < self.power < float("inf"):
            raise ValueError(f"BM25: power must be finite and above 0, got {self.power}.")

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
        size = len(self.frequencies)
        frequencies = self.frequencies + torch.bincount(tokens.counts(size)[1], minlength=size)
        return Statistics(self.documents + len(tokens), self.tokens + len(tokens.ids), frequencies)
