"""A synthetic collection of learned-sparse vectors, drawn on the device.

Terms come from a shifted Zipf law, p(rank) ~ (rank + shift)^-1.1, without repetition; a term's number is its rank. A
document has 127 terms on average, a query 50, half of them from the law and half from a random document. The shift is
chosen so that the law alone makes a query and a document share 4.4 terms: published models have 3.82 for 25 and 231 terms
and 1.32 for 18 and 92, which is 6.6e-4 and 8.0e-4 of the product of the lengths, and 6.9e-4 of 50 x 127 is 4.4. Weights
are exponential, in [0.01, 3.5], and smaller for the most frequent terms.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor

from pylate_fastmaxsim import SparseBatch
from pylate_fastmaxsim.kernels.sparse.postings import DOCUMENTS_PER_BLOCK

VOCABULARY = 30_522  # of BERT
EXPONENT = 1.1
SHIFT = 45.39479305058194  # with which 4.4 terms are shared
DOCUMENT_DRAWS, QUERY_DRAWS = 133.34570358198016, 50.97373840530963  # of the law, for 127 and 50 different terms
SPREAD = 0.27  # of the number of draws: standard deviation relative to the mean
DRAWS_PER_CHUNK = 2**25  # about 1 GB while they are sorted


@cache
def term_law() -> Tensor:
    """The probability of each term, ``[VOCABULARY]``, float64."""
    weights = (torch.arange(1, VOCABULARY + 1, dtype=torch.float64) + SHIFT) ** -EXPONENT
    return weights / weights.sum()


class Draw:
    """Random rows of terms on a device; ``VOCABULARY`` stands for no term."""

    def __init__(self, device: torch.device, seed: int) -> None:
        self.generator = torch.Generator(device).manual_seed(seed)
        self.cumulative = term_law().cumsum(0).float().to(device)

    def numbers(self, rows: int, mean: float) -> Tensor:
        """How many draws each row makes."""
        noise = torch.randn(rows, generator=self.generator, device=self.generator.device)
        return (mean * (1 + SPREAD * noise)).round().clamp(max(1, mean / 10), 2 * mean).int()

    def terms(self, numbers: Tensor) -> Tensor:
        """As many terms of the law as each row draws, ``[rows, slots]``; they may repeat."""
        uniform = self.uniform(len(numbers), int(numbers.max()))
        return first(torch.searchsorted(self.cumulative, uniform, out_int32=True).clamp_(max=VOCABULARY - 1), numbers)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator, device=self.generator.device)

    def batch(self, terms: Tensor) -> SparseBatch:
        """The different terms of each row, with float16 weights."""
        terms = terms.sort(dim=1).values
        kept = terms < VOCABULARY
        kept[:, 1:] &= terms[:, 1:] != terms[:, :-1]
        offsets = torch.nn.functional.pad(kept.sum(1).cumsum(0), (1, 0))
        terms = terms[kept]
        strength = 0.35 + 0.65 * ((terms + 1).float().log() / math.log(3000)).clamp(max=1)
        weights = -0.6 * strength * self.uniform(len(terms)).clamp_(min=1e-6).log()
        return SparseBatch._trusted(offsets, terms.to(torch.uint16), weights.clamp(0.01, 3.5).half(), VOCABULARY)


def first(terms: Tensor, numbers: Tensor) -> Tensor:
    """The first so many terms of each row."""
    return terms.masked_fill_(torch.arange(terms.shape[1], device=terms.device) >= numbers[:, None], VOCABULARY)


def documents(count: int, device: torch.device) -> Iterator[SparseBatch]:
    """The collection in chunks of whole blocks of the index; the same each time on the same device."""
    draw = Draw(device, seed=1)
    chunk = max(1, int(DRAWS_PER_CHUNK / (2 * DOCUMENT_DRAWS)) // DOCUMENTS_PER_BLOCK) * DOCUMENTS_PER_BLOCK
    for start in range(0, count, chunk):
        yield draw.batch(draw.terms(draw.numbers(min(chunk, count - start), DOCUMENT_DRAWS)))


def queries(collection: list[SparseBatch], count: int) -> SparseBatch:
    """Queries of which each has half of its terms from a document of the collection."""
    device = collection[0].device
    draw = Draw(device, seed=2)
    numbers = draw.numbers(count, QUERY_DRAWS)
    sizes = [len(chunk) for chunk in collection]
    chosen = torch.randint(sum(sizes), (count,), generator=torch.Generator().manual_seed(2))
    parts, start = [], 0
    for chunk, size in zip(collection, sizes, strict=True):
        parts.append(chunk.select((chosen[(chosen >= start) & (chosen < start + size)] - start).to(device)))
        start += size
    sources = SparseBatch.concatenate(parts)
    lengths = sources.offsets.diff()
    copied = torch.full((count, int(lengths.max())), VOCABULARY, dtype=torch.int32, device=device)
    copied[torch.arange(copied.shape[1], device=device) < lengths[:, None]] = sources.terms.int()
    order = draw.uniform(*copied.shape).masked_fill_(copied == VOCABULARY, 2).argsort(dim=1)
    copied = first(copied.gather(1, order), numbers // 2)
    return draw.batch(torch.cat([draw.terms((numbers + 1) // 2), copied], dim=1))


def describe(collection: list[SparseBatch], asked: SparseBatch) -> dict:
    """What was drawn: postings, terms a vector, and terms that a query and a document share."""

    def frequencies(batch: SparseBatch) -> Tensor:
        return torch.bincount(batch.terms.int(), minlength=VOCABULARY)

    count, frequency = sum(map(len, collection)), sum(map(frequencies, collection))
    postings = int(frequency.sum())
    return {
        "documents": count,
        "postings": postings,
        "terms_per_document": postings / count,
        "terms_per_query": len(asked.terms) / len(asked),
        "shared_terms": int((frequencies(asked) * frequency).sum()) / count / len(asked),
    }
