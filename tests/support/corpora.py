"""Documents for corpora on disk, and what a corpus holds."""

import torch

from pylate_fastmaxsim import TokenBatch
from pylate_fastmaxsim.codec import ResidualCodec
from tests.support.residual_codecs import random_codec


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


def vectors(batches) -> list[list]:
    """The vectors of each document of batches, compressed ones or not."""
    batches = [batch if isinstance(batch, TokenBatch) else batch.decompress() for batch in batches]
    return [
        batch.values[start : start + length].float().tolist()
        for batch in batches
        for start, length in zip(batch.starts.tolist(), batch.lengths.tolist(), strict=True)
    ]


def codec(d: int = 16, bits: int = 2, seed: int = 0) -> ResidualCodec:
    """A codec that nobody has trained."""
    return random_codec(d, bits, centroids=8, seed=seed)


# By name; None: bfloat16, without compression.
FORMATS = {"bfloat16": None, "int8": "int8", "fp8": "fp8", "residual": codec()}
