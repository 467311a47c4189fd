"""How documents are stored: the arrays of each format, made from a batch and made into one again."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from pylate_fastmaxsim.codec import ResidualCodec
from pylate_fastmaxsim.compressed import CompressedBatch, Fp8, Int8, Residual, compress
from pylate_fastmaxsim.tokens import TokenBatch

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
CODEC_FILE = "codec.safetensors"

Arrays = dict[str, Tensor]
Batch = TokenBatch | CompressedBatch


@dataclass(frozen=True)
class Column:
    """One array of a format: its dtype, and the numbers of a row, or None where a row is one number."""

    dtype: torch.dtype
    width: int | None = None
    per_document: bool = False  # a row for each document, not for each token

    def shape(self, documents: int, tokens: int) -> tuple[int, ...]:
        rows = documents if self.per_document else tokens
        return (rows,) if self.width is None else (rows, self.width)

    def nbytes(self, documents: int, tokens: int) -> int:
        return (
            (documents if self.per_document else tokens)
            * (1 if self.width is None else self.width)
            * self.dtype.itemsize
        )


@dataclass(frozen=True)
class Plain:
    """Token vectors as they are, rounded to a dtype."""

    dim: int
    dtype: torch.dtype

    @property
    def name(self) -> str:
        return next(name for name, dtype in DTYPES.items() if dtype == self.dtype)

    @property
    def columns(self) -> dict[str, Column]:
        return {"values": Column(self.dtype, self.dim)}

    def encode(self, batch: TokenBatch) -> Arrays:
        rounded = batch.values.to(self.dtype)
        if bool((rounded.isinf() & batch.values.isfinite()).any()):
            raise ValueError(f"write_corpus: vectors hold numbers that are too large for {self.dtype}.")
        return {"values": rounded}

    def decode(self, arrays: Arrays, starts: Tensor, lengths: Tensor, longest: int) -> TokenBatch:
        return TokenBatch(arrays["values"], starts, lengths, longest, gapless=True)


@dataclass(frozen=True)
class Int8Documents:
    """int8, with a scale for each document."""

    dim: int
    name = "int8"

    @property
    def columns(self) -> dict[str, Column]:
        return {"values": Column(torch.int8, self.dim), "scales": Column(torch.float32, per_document=True)}

    def encode(self, batch: TokenBatch) -> Arrays:
        tokens = compress(batch, "int8").tokens
        return {"values": tokens.values, "scales": tokens.scales}

    def decode(self, arrays: Arrays, starts: Tensor, lengths: Tensor, longest: int) -> CompressedBatch:
        tokens = Int8(arrays["values"], arrays["scales"], per_token=False)
        return CompressedBatch(tokens, starts, lengths, longest, gapless=True)


@dataclass(frozen=True)
class Fp8Documents:
    """float8_e4m3fn, with one scale."""

    dim: int
    scale: float
    name = "fp8"

    @property
    def columns(self) -> dict[str, Column]:
        return {"values": Column(torch.float8_e4m3fn, self.dim)}

    def encode(self, batch: TokenBatch) -> Arrays:
        largest = torch.finfo(torch.float8_e4m3fn).max * self.scale
        if batch.values.numel() and bool(batch.values.abs().amax() > largest):
            raise ValueError(
                f"write_corpus: vectors must hold numbers of at most {largest:g} in magnitude, which is what fits the fp8 "
                f"scale {self.scale:g} that the first batch has set; normalise the vectors, or write another format."
            )
        return {"values": compress(batch, "fp8", _scale=self.scale).tokens.values}

    def decode(self, arrays: Arrays, starts: Tensor, lengths: Tensor, longest: int) -> CompressedBatch:
        return CompressedBatch(Fp8(arrays["values"], self.scale), starts, lengths, longest, gapless=True)


@dataclass(frozen=True, eq=False)
class ResidualDocuments:
    """Centroids and residual codes. PLAID stores no scales, and codes as int64."""

    codec: ResidualCodec
    codes: torch.dtype = torch.int32
    has_scales: bool = True
    name = "residual"

    @property
    def dim(self) -> int:
        return self.codec.dim

    @property
    def columns(self) -> dict[str, Column]:
        columns = {"codes": Column(self.codes), "packed": Column(torch.uint8, self.dim * self.codec.bits // 8)}
        return columns | ({"scales": Column(torch.float32)} if self.has_scales else {})

    def encode(self, batch: TokenBatch) -> Arrays:
        tokens = compress(batch, self.codec.to(batch.device)).tokens
        return {"codes": tokens.codes.to(self.codes), "packed": tokens.packed, "scales": tokens.scales}

    def decode(self, arrays: Arrays, starts: Tensor, lengths: Tensor, longest: int) -> CompressedBatch:
        codec = self.codec.to(arrays["codes"].device)
        tokens = Residual(arrays["codes"], arrays["packed"], arrays.get("scales"), codec)
        return CompressedBatch(tokens, starts, lengths, longest, gapless=True)


Format = Plain | Int8Documents | Fp8Documents | ResidualDocuments
# What a caller of write_corpus asks for.
Chosen = torch.dtype | str | ResidualCodec


def chosen_format(dtype: torch.dtype, format: object) -> Chosen:
    """What the arguments ``dtype`` and ``format`` of write_corpus say. ValueError if they are none."""
    if dtype not in DTYPES.values():
        raise ValueError(f"write_corpus: dtype must be one of {', '.join(map(str, DTYPES.values()))}, got {dtype}.")
    if format is None:
        return dtype
    if format not in ("int8", "fp8") and not isinstance(format, ResidualCodec):
        raise ValueError(f"write_corpus: format must be None, 'int8', 'fp8' or a ResidualCodec, got {format!r}.")
    if dtype != torch.bfloat16:
        raise ValueError(f"write_corpus: dtype is of documents that are not compressed; leave it out with {format!r}.")
    return format


def format_of(chosen: Chosen, first: TokenBatch) -> Format:
    """The format of documents like those of the first batch."""
    if isinstance(chosen, torch.dtype):
        return Plain(first.dim, chosen)
    if chosen == "int8":
        return Int8Documents(first.dim)
    if chosen == "fp8":
        return Fp8Documents(first.dim, compress(first, "fp8").tokens.scale)
    return ResidualDocuments(chosen)


def require_chosen(held: str, format: Format, chosen: Chosen) -> None:
    """Raise ValueError unless documents go on in the format; ``held`` names those that it is of."""
    other = chosen
    if isinstance(chosen, torch.dtype):
        if format.name == (other := str(chosen).removeprefix("torch.")):
            return
    elif isinstance(chosen, ResidualCodec):
        other = f"a codec of {chosen.bits} bits and d = {chosen.dim}"
        if isinstance(format, ResidualDocuments):
            if format.codec.checksum == chosen.checksum:
                return
            other += f" that is not the one that they were begun with ({CODEC_FILE})"
    elif format.name == chosen:
        return
    raise ValueError(
        f"write_corpus: {held} of the format {format.name!r}, which cannot go on with {other}; choose another folder."
    )


def described(format: Format) -> dict:
    """What the description of a corpus says of its format."""
    if isinstance(format, Plain):
        return {"dim": format.dim, "dtype": format.name}
    if isinstance(format, Fp8Documents):
        return {"dim": format.dim, "stored": format.name, "scale": format.scale}
    if isinstance(format, ResidualDocuments):
        return {"dim": format.dim, "stored": format.name, "codec": format.codec.checksum}
    return {"dim": format.dim, "stored": format.name}


def format_from(folder: Path, description: dict) -> Format:
    """The format of a folder, of which ``description`` says what :func:`described` returns. ValueError if it does not."""
    dim, stored = description["dim"], description.get("stored")
    if stored is None:
        return Plain(dim, DTYPES[description["dtype"]])
    if stored == "int8":
        return Int8Documents(dim)
    if stored == "fp8":
        return Fp8Documents(dim, description["scale"])
    file = folder / CODEC_FILE
    if not file.exists():
        raise ValueError(f"Corpus: {file} is missing, without which residual codes cannot be read; put it back.")
    codec = ResidualCodec.load(file)
    if codec.checksum != description["codec"]:
        raise ValueError(f"Corpus: {file} is not the codec that the corpus was written with; put that back.")
    return ResidualDocuments(codec)
