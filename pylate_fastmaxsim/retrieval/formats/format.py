"""Formats of stored documents: the arrays of each, made from a batch and made into one again."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pylate_fastmaxsim.codec import ResidualCodec
from pylate_fastmaxsim.compressed import CompressedBatch, Fp8, Int8, Residual, compress
from pylate_fastmaxsim.tokens import TokenBatch

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
STORED = DTYPES | {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
CODEC_FILE = "codec.safetensors"

Arrays = dict[str, Tensor]
Batch = TokenBatch | CompressedBatch


@dataclass(frozen=True)
class Column:
    """One array of a format: its dtype, and the numbers of a row, or None where a row is one number."""

    dtype: torch.dtype
    width: int | None = None
    per_document: bool = False  # a row for each document, not for each token
    more: int = 0  # rows behind those

    def rows(self, documents: int, tokens: int) -> int:
        return (documents if self.per_document else tokens) + self.more

    def shape(self, documents: int, tokens: int) -> tuple[int, ...]:
        rows = self.rows(documents, tokens)
        return (rows,) if self.width is None else (rows, self.width)

    def nbytes(self, documents: int, tokens: int) -> int:
        return math.prod(self.shape(documents, tokens)) * self.dtype.itemsize


# Of every format: where documents begin and end in the rows of tokens, as cu_seqlens.
BOUNDS = Column(torch.int64, per_document=True, more=1)


@dataclass(frozen=True)
class Format:
    """Documents as vectors of a dtype, as int8 with a scale for each, as fp8 with one scale, or as residual codes."""

    name: str  # of DTYPES, "int8", "fp8" or "residual"
    dim: int
    scale: float | None = None  # of fp8
    codec: ResidualCodec | None = None  # of residual codes
    has_scales: bool = True  # residual codes in PLAID's files have none

    @property
    def dtype(self) -> torch.dtype | None:
        """Dtype of vectors that are not compressed, else None."""
        return DTYPES.get(self.name)

    @property
    def columns(self) -> dict[str, Column]:
        if self.codec is not None:
            columns = {"codes": Column(torch.int32), "packed": Column(torch.uint8, self.dim * self.codec.bits // 8)}
            return columns | ({"scales": Column(torch.float32)} if self.has_scales else {})
        columns = {"values": Column(STORED[self.name], self.dim)}
        return columns | ({"scales": Column(torch.float32, per_document=True)} if self.name == "int8" else {})

    def encode(self, batch: TokenBatch) -> Arrays:
        if self.dtype is not None:
            rounded = batch.values.to(self.dtype)
            # A sum takes a fraction of the time, and that of bfloat16 is seldom infinite otherwise.
            if not rounded.sum().isfinite() and bool((rounded.isinf() & batch.values.isfinite()).any()):
                raise ValueError(f"write_corpus: vectors hold numbers that are too large for {self.dtype}.")
            return {"values": rounded}
        if self.scale is not None:
            largest = torch.finfo(torch.float8_e4m3fn).max * self.scale
            if batch.values.numel() and bool(batch.values.abs().amax() > largest):
                raise ValueError(
                    f"write_corpus: vectors must hold numbers of at most {largest:g} in magnitude, which is what fits the "
                    f"fp8 scale {self.scale:g} that the first batch has set; normalise the vectors, or write another "
                    "format."
                )
        codec = self.codec and self.codec.to(batch.device)
        tokens = compress(batch, codec or self.name, _scale=self.scale).tokens
        return {name: getattr(tokens, name) for name in self.columns}

    def decode(self, arrays: Arrays, starts: Tensor, lengths: Tensor, longest: int) -> Batch:
        if self.dtype is not None:
            return TokenBatch(arrays["values"], starts, lengths, longest, gapless=True)
        if self.codec is not None:
            codec = self.codec.to(arrays["codes"].device)
            tokens = Residual(arrays["codes"], arrays["packed"], arrays.get("scales"), codec)
        elif self.name == "int8":
            tokens = Int8(arrays["values"], arrays["scales"], per_token=False)
        else:
            tokens = Fp8(arrays["values"], self.scale)
        return CompressedBatch(tokens, starts, lengths, longest, gapless=True)

    def described(self) -> dict[str, Any]:
        """Entries of the description of a corpus, for :func:`format_from`."""
        if self.dtype is not None:
            return {"dim": self.dim, "dtype": self.name}
        of_fp8 = {} if self.scale is None else {"scale": self.scale}
        of_codes = {} if self.codec is None else {"codec": self.codec.checksum}
        return {"dim": self.dim, "stored": self.name, **of_fp8, **of_codes}


# What a caller of write_corpus asks for.
Chosen = str | ResidualCodec


def chosen_format(dtype: torch.dtype, format: object) -> Chosen:
    """Format that the arguments ``dtype`` and ``format`` of write_corpus name. ValueError if they name none."""
    if dtype not in DTYPES.values():
        raise ValueError(f"write_corpus: dtype must be one of {', '.join(map(str, DTYPES.values()))}, got {dtype}.")
    if format is None:
        return str(dtype).removeprefix("torch.")
    if format not in ("int8", "fp8") and not isinstance(format, ResidualCodec):
        raise ValueError(f"write_corpus: format must be None, 'int8', 'fp8' or a ResidualCodec, got {format!r}.")
    if dtype != torch.bfloat16:
        raise ValueError(f"write_corpus: dtype is of documents that are not compressed; leave it out with {format!r}.")
    return format


def format_of(chosen: Chosen, first: TokenBatch) -> Format:
    """The format of documents like those of the first batch."""
    if isinstance(chosen, ResidualCodec):
        return Format("residual", chosen.dim, codec=chosen)
    return Format(chosen, first.dim, compress(first, "fp8").tokens.scale if chosen == "fp8" else None)


def require_chosen(held: str, format: Format, chosen: Chosen) -> None:
    """Raise ValueError unless documents go on in the format; ``held`` begins the sentence with those that it is of."""
    if isinstance(chosen, ResidualCodec):
        if format.codec is not None and format.codec.checksum == chosen.checksum:
            return
        chosen = f"a codec of {chosen.bits} bits and d = {chosen.dim}"
        if format.codec is not None:
            chosen += f" that is not the one that they were begun with ({CODEC_FILE})"
    elif format.name == chosen:
        return
    raise ValueError(f"{held} of the format {format.name!r}, which cannot go on with {chosen}; choose another folder.")


def format_from(folder: Path, description: dict[str, Any]) -> Format:
    """The format of a folder, of which ``description`` says what ``described`` returns. ValueError if it does not."""
    name = description.get("stored") or description["dtype"]
    if name != "residual":
        return Format(name, description["dim"], description.get("scale"))
    file = folder / CODEC_FILE
    if not file.exists():
        raise ValueError(f"Corpus: {file} is missing, without which residual codes cannot be read; put it back.")
    codec = ResidualCodec.load(file)
    if codec.checksum != description["codec"]:
        raise ValueError(f"Corpus: {file} is not the codec that the corpus was written with; put that back.")
    return Format(name, codec.dim, codec=codec)
