"""Documents for corpora on disk, and what a corpus holds."""

from __future__ import annotations

import torch

from pylate_fastmaxsim import TokenBatch
from pylate_fastmaxsim.codec import ResidualCodec


def documents(count: int, longest: int = 6, d: int = 3, seed: int = 0) -> list[torch.Tensor]:
    """Some of them empty. Small integers, so that all scores are exact."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, longest + 1, (count,), generator=generator).tolist()
    return [torch.randint(-2, 3, (length, d), generator=generator).float() for length in lengths]


def unit_documents(count: int, d: int = 16, seed: int = 0) -> list[torch.Tensor]:
    """Unit vectors, some documents empty."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.nn.functional.normalize(torch.randn(len(tokens), d, generator=generator), dim=-1)
        for tokens in documents(count, seed=seed)
    ]


def grouped(sequences: list[torch.Tensor], size: int) -> list[TokenBatch]:
    return [TokenBatch.from_list(sequences[begin : begin + size]) for begin in range(0, len(sequences), size)]


def lists(batches) -> list[list]:
    """The vectors of each document."""
    return [
        batch.values[start : start + length].float().tolist()
        for batch in batches
        for start, length in zip(batch.starts.tolist(), batch.lengths.tolist(), strict=True)
    ]


def codec(d: int = 16, bits: int = 2, seed: int = 0) -> ResidualCodec:
    """A codec that nobody has trained."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.linspace(-0.5, 0.5, 2**bits)
    centroids = torch.nn.functional.normalize(torch.randn(8, d, generator=generator), dim=-1)
    return ResidualCodec(centroids.half(), weights.half(), (weights[1:] + weights[:-1]) / 2)
