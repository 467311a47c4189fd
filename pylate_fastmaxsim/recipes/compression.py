"""Formats of compressed documents by the names that recipes and options have for them."""

from collections.abc import Callable, Iterable

import torch

from pylate_fastmaxsim.codec import ResidualCodec
from pylate_fastmaxsim.compressed import CompressedBatch, compress
from pylate_fastmaxsim.recipes.errors import as_recipe_error
from pylate_fastmaxsim.tokens import TokenBatch

Compress = Callable[[TokenBatch], TokenBatch | CompressedBatch]

RESIDUAL = "residual-"  # and the bits of each number

# A codec is trained on so many tokens of so many documents, chosen at random, or on all that there are.
SAMPLE_DOCUMENTS, SAMPLE_TOKENS = 1 << 14, 1 << 20


def needs_codec(name: str | None) -> bool:
    """True if documents of this format are codes of a codec, which is trained on some of them."""
    return name is not None and name.startswith(RESIDUAL)


def sampled(documents: int) -> list[int]:
    """Numbers of the documents that a codec is trained on, the same at each call."""
    order = torch.randperm(documents, generator=torch.Generator().manual_seed(0))
    return order[:SAMPLE_DOCUMENTS].tolist()


def train_codec(key: str, name: str, batches: Iterable[TokenBatch]) -> ResidualCodec:
    """The codec of a format for documents like these, of which no more are asked for than are needed.

    ``key`` is what errors call the format.
    """
    some, tokens = [], 0
    for batch in batches:
        some.append(batch.values[: SAMPLE_TOKENS - tokens].float())
        tokens += len(some[-1])
        if tokens == SAMPLE_TOKENS:
            break
    with as_recipe_error(key, (ValueError, ImportError)):
        return ResidualCodec.train(torch.cat(some), bits=int(name.removeprefix(RESIDUAL)))


def compressor(key: str, format: str | ResidualCodec | None) -> Compress:
    """A function that brings a batch into a format, or leaves it as it is where that is None.

    It raises RecipeError if an embedding is NaN or infinite.
    """
    if format is None:
        return lambda batch: batch

    def compressed(batch: TokenBatch) -> CompressedBatch:
        with as_recipe_error(key):
            return compress(batch, format)

    return compressed
