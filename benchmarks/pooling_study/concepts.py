"""Data of the study: token vectors near one of 100 random concepts."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Generator, Tensor
from torch.nn.functional import normalize

CONCEPTS = 100
QUERY_TOKENS = 16
QUERY_CONCEPTS = 8  # tokens of a positive that share the concepts of its query's first 8 tokens
NOISE = 0.1  # standard deviation of each component at d = 16; the noise has the same length at any d
TARGETED_NOISE = 0.3  # of tokens that are aimed at a query


def generator(seed: int, use: int) -> Generator:
    """Random numbers of a seed; each use has its own."""
    return Generator().manual_seed(100 * seed + use)


@dataclass(frozen=True)
class Pairs:
    """Queries ``[N, 16, d]``, the concept of each of their tokens ``[N, 16]``, and their positives ``[N, M, d]``."""

    queries: Tensor
    wanted: Tensor
    documents: Tensor

    def first(self, count: int) -> Pairs:
        return Pairs(self.queries[:count], self.wanted[:count], self.documents[:count])


class Concepts:
    """``[100, d]`` unit vectors, and tokens drawn near them: float32, of length 1."""

    def __init__(self, dimension: int, seed: int) -> None:
        self.vectors = normalize(torch.randn(CONCEPTS, dimension, generator=generator(seed, 0)), dim=-1)

    def near(self, concepts: Tensor, noise: float, random: Generator) -> Tensor:
        """A token near each of ``concepts``, ``[..., d]``."""
        centres = self.vectors[concepts]
        scale = noise * (16 / centres.shape[-1]) ** 0.5
        return normalize(centres + scale * torch.randn(centres.shape, generator=random), dim=-1)

    def pairs(self, count: int, tokens: int, random: Generator) -> Pairs:
        """Queries with a positive each: tokens of 8 concepts of its query, then of any."""
        wanted = torch.randint(CONCEPTS, (count, QUERY_TOKENS), generator=random)
        found = torch.randint(CONCEPTS, (count, tokens), generator=random)
        found[:, :QUERY_CONCEPTS] = wanted[:, :QUERY_CONCEPTS]
        return Pairs(self.near(wanted, NOISE, random), wanted, self.near(found, NOISE, random))

    def of_length(self, pairs: Pairs, tokens: int, random: Generator) -> Pairs:
        """The same pairs with documents cut to ``tokens``, or with tokens of random concepts behind them."""
        count, length = pairs.documents.shape[:2]
        more = torch.randint(CONCEPTS, (count, max(0, tokens - length)), generator=random)
        documents = torch.cat([pairs.documents[:, :tokens], self.near(more, NOISE, random)], 1)
        return replace(pairs, documents=documents)

    def aimed_at(self, wanted: Tensor, count: int, random: Generator) -> Tensor:
        """Hard negatives ``[count, d]``: near concepts of a query, with more noise than its own tokens."""
        picked = wanted[torch.randint(len(wanted), (count,), generator=random)]
        return self.near(picked, TARGETED_NOISE, random)
