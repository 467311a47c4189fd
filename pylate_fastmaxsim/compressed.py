"""Documents in a quarter to an eighth of their memory, for scoring as they are stored."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from pylate_fastmaxsim._checks import require_integer
from pylate_fastmaxsim._dtypes import sum_dtype
from pylate_fastmaxsim.codec import ResidualCodec, chunks
from pylate_fastmaxsim.tokens import TokenBatch, Tokens, as_batch, check_sequences, share_rows, tensors_on

FORMATS = ("int8", "fp8")

# Largest numbers of the formats. -128 is not used, so that a vector and its negative are rounded alike.
_INT8_MAX = 127.0
_FP8_MAX = 448.0

# Fits numbers up to 1.75, so those of unit vectors: batches of one corpus then have one scale. Where no number is as large
# as the least, which some number of a unit vector is (d up to 2**16), it would round many to 0.
_FP8_SCALE = 2.0**-8
_FP8_LEAST = 2.0**-8


class _Tokens:
    """Token vectors in a compressed format, whose numbers lie in ``values [T, d]``."""

    def __len__(self) -> int:
        return self.tensors[0].shape[0]

    @property
    def dim(self) -> int:
        return self.values.shape[1]

    @property
    def device(self) -> torch.device:
        return self.tensors[0].device

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        values = [getattr(self, field.name) for field in fields(self)]
        return tuple([value for value in values if isinstance(value, Tensor)])

    def to(self, device: torch.device, non_blocking: bool = False) -> _Tokens:
        return replace(self, **tensors_on(device, self, non_blocking))


@dataclass(frozen=True, eq=False)
class Int8(_Tokens):
    """Token vectors as whole numbers and scales: a number is value * scale.

    ``values`` int8 ``[T, d]``, from -127 to 127; ``scales`` float32, not negative, ``[T]`` where ``per_token``, else
    ``[N]``, one for each document.
    """

    values: Tensor
    scales: Tensor
    per_token: bool


@dataclass(frozen=True, eq=False)
class Fp8(_Tokens):
    """Token vectors as float8_e4m3fn ``[T, d]``: a number is value * ``scale``, a power of two."""

    values: Tensor
    scale: float

    def __reduce__(self):
        # As bytes, because PyTorch 2.11 pickles float8 but cannot read it.
        return _fp8_of_bytes, (self.values.view(torch.uint8), self.scale)


def _fp8_of_bytes(values: Tensor, scale: float) -> Fp8:
    return Fp8(values.view(torch.float8_e4m3fn), scale)


@dataclass(frozen=True, eq=False)
class Residual(_Tokens):
    """Token vectors as residual codes: (centroid + bucket weights) * scale, in float32.

    ``codes`` int32 or int64 ``[T]``, ``packed`` uint8 ``[T, d * bits / 8]``, ``scales`` float32 ``[T]``. Scales are None
    where every vector has length 1, as in PLAID's files.
    """

    codes: Tensor
    packed: Tensor
    scales: Tensor | None
    codec: ResidualCodec

    @property
    def dim(self) -> int:
        return self.codec.dim

    def to(self, device: torch.device, non_blocking: bool = False) -> Residual:
        return replace(self, codec=self.codec.to(device), **tensors_on(device, self, non_blocking))


@dataclass(frozen=True, eq=False)
class CompressedBatch:
    """N documents of token vectors in a compressed format: the sequences of a ``TokenBatch`` over other tokens.

    Made by :func:`compress`. :func:`pylate_fastmaxsim.maxsim` takes it as documents and scores it as it is stored. It
    has no gradient.

    Parameters
    ----------
    tokens
        ``Int8``, ``Fp8`` or ``Residual``, of T tokens.
    starts, lengths, max_length, keep, gapless
        As in :class:`pylate_fastmaxsim.TokenBatch`.

    Raises
    ------
    ValueError
        A shape, dtype or device is not the one above, or a sequence is longer than ``max_length`` or lies outside of the
        tokens. The numbers in ``starts`` and ``lengths`` are checked on a CPU only.
    TypeError
        An argument is of the wrong type.

    Examples
    --------
    >>> import torch
    >>> from pylate_fastmaxsim import TokenBatch, compress
    >>> batch = compress(TokenBatch.from_list([torch.ones(2, 4), torch.ones(3, 4)]), "int8")
    >>> len(batch), batch.dim, batch.format, batch.tokens.values.dtype
    (2, 4, 'int8', torch.int8)
    """

    tokens: Int8 | Fp8 | Residual
    starts: Tensor
    lengths: Tensor
    max_length: int
    keep: Tensor | None = None
    gapless: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.tokens, (Int8, Fp8, Residual)):
            raise TypeError(
                f"CompressedBatch: tokens must be Int8, Fp8 or Residual, got {type(self.tokens).__name__}; "
                "pylate_fastmaxsim.compress makes them of a TokenBatch."
            )
        object.__setattr__(self, "max_length", require_integer("CompressedBatch: max_length", self.max_length))
        check_sequences("CompressedBatch", "tokens", self, len(self.tokens))
        if isinstance(self.tokens, Int8) and not self.tokens.per_token and len(self.tokens.scales) != len(self):
            raise ValueError(
                f"CompressedBatch: scales must be [N] with N = {len(self)}, got [{len(self.tokens.scales)}]."
            )

    def __len__(self) -> int:
        return self.starts.shape[0]

    @property
    def dim(self) -> int:
        """Size d of a token vector."""
        return self.tokens.dim

    @property
    def device(self) -> torch.device:
        return self.tokens.device

    @property
    def format(self) -> str:
        """``"int8"``, ``"fp8"`` or ``"residual"``."""
        return type(self.tokens).__name__.lower()

    @property
    def nbytes(self) -> int:
        """Memory of all tensors, in bytes, without the codec, which batches share."""
        sequences = [self.starts, self.lengths] + [self.keep] * (self.keep is not None)
        return sum(tensor.nbytes for tensor in (*self.tokens.tensors, *sequences))

    def select(self, index: Tensor) -> CompressedBatch:
        """The sequences ``index`` (int64, any length), in that order. No token is copied.

        Examples
        --------
        >>> import torch
        >>> from pylate_fastmaxsim import TokenBatch, compress
        >>> batch = compress(TokenBatch.from_list([torch.ones(2, 4), 3 * torch.ones(1, 4)]), "int8")
        >>> batch.select(torch.tensor([1, 1])).lengths.tolist()
        [1, 1]
        """
        tokens = self.tokens
        if isinstance(tokens, Int8) and not tokens.per_token:
            tokens = replace(tokens, scales=tokens.scales[index])
        return replace(self, tokens=tokens, starts=self.starts[index], lengths=self.lengths[index], gapless=False)

    def to(self, device: str | torch.device, non_blocking: bool = False) -> CompressedBatch:
        """The batch on a device; ``non_blocking`` as in ``torch.Tensor.to``."""
        tokens = self.tokens.to(device, non_blocking)
        return replace(self, tokens=tokens, **tensors_on(device, self, non_blocking))

    def decompress(self, dtype: torch.dtype = torch.float32) -> TokenBatch:
        """Decompress to the vectors that are scored, a copy of dtype ``dtype``.

        Rows of ``values`` are those of ``tokens``. A row of no document holds zeros where scales are those of documents.

        Examples
        --------
        >>> import torch
        >>> from pylate_fastmaxsim import TokenBatch, compress
        >>> compress(TokenBatch.from_list([torch.tensor([[127.0, -3.0]])]), "int8").decompress().values
        tensor([[127.,  -3.]])
        """
        tokens = self.tokens
        if isinstance(tokens, Residual):
            values = tokens.codec.decode(tokens.codes, tokens.packed, tokens.scales, dtype)
        else:
            exact = sum_dtype(dtype)
            if isinstance(tokens, Fp8):
                scales = torch.full((len(tokens),), tokens.scale, device=self.device)
            elif tokens.per_token:
                scales = tokens.scales
            else:
                document, inside = _documents_of_rows(self, len(tokens))
                scales = tokens.scales[document].where(inside, 0) if len(self) else torch.zeros_like(inside)
            values = torch.empty(len(tokens), tokens.dim, dtype=dtype, device=self.device)
            for rows in chunks(*values.shape):
                values[rows] = tokens.values[rows].to(exact) * scales[rows, None].to(exact)
        return TokenBatch(values, self.starts, self.lengths, self.max_length, self.keep, self.gapless)


def compress(
    batch: Tokens,
    format: str | ResidualCodec,
    *,
    per_token: bool = False,
    _scale: float | None = None,
) -> CompressedBatch:
    """Compress documents, to be scored by :func:`pylate_fastmaxsim.maxsim` as they are stored.

    Parameters
    ----------
    batch
        Documents, in any form that :func:`pylate_fastmaxsim.maxsim` takes. Rows that belong to none and rows that ``keep``
        leaves out may hold anything.
    format
        ``"int8"``: whole numbers from -127 to 127 and scales. ``"fp8"``: float8_e4m3fn and one power of two as a scale,
        2**-8 where the largest number is from 2**-8 to 1.75, else the one that fits it. A
        :class:`pylate_fastmaxsim.ResidualCodec`: its codes.
    per_token
        With ``"int8"``, a scale for each token rather than for each document: for documents whose tokens differ in
        length.

    Raises
    ------
    ValueError
        The format is another, ``per_token`` is asked for with another than ``"int8"``, the codec is for another d or on
        another device, the vectors want a gradient, two documents share some of their rows but not all, or a token that
        counts holds NaN or infinity. Looking for the last two waits for the device.
    TypeError
        ``batch`` is none.

    Examples
    --------
    >>> import torch
    >>> from pylate_fastmaxsim import TokenBatch, compress, maxsim
    >>> documents = compress(TokenBatch.from_list([torch.tensor([[1.0, 0.3]]), torch.eye(2)]), "int8")
    >>> documents.tokens.values.tolist(), documents.tokens.scales
    ([[127, 38], [127, 0], [0, 127]], tensor([0.0079, 0.0079]))
    >>> maxsim(torch.tensor([[[1.0, 0.5]]]), documents)
    tensor([[1.1508, 1.0000]])
    """
    # `_scale` is that of fp8 where other batches of a corpus have set it.
    batch = as_batch("compress", "batch", batch)
    if not isinstance(format, ResidualCodec) and format not in FORMATS:
        raise ValueError(f'compress: format must be "int8", "fp8" or a ResidualCodec, got {format!r}.')
    if per_token and format != "int8":
        raise ValueError('compress: per_token goes with the format "int8" alone.')
    if isinstance(format, ResidualCodec):
        format.require_fitting("compress", batch.values)
    if batch.values.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "compress: compressed documents have no gradient, but these vectors want one; "
            "detach them, or compress under torch.no_grad()."
        )
    if len(batch) and not batch.gapless and share_rows(*torch.stack((batch.starts, batch.lengths)).unique(dim=1)):
        raise ValueError("compress: documents must not share rows, unless they share all of them.")
    values = batch.values.detach()
    document, live = _documents_of_rows(batch, len(values))
    if batch.keep is not None:
        live = live & batch.keep
    # The largest magnitude of each row that counts.
    largest = torch.empty(len(values), dtype=torch.float32, device=values.device)
    for rows in chunks(*values.shape):
        largest[rows] = _live(values, live, rows).abs_().amax(dim=1)
    if not bool(largest.isfinite().all()):
        raise ValueError(
            "compress: token vectors must be finite in float32, got NaN or infinity in a token that counts."
        )
    if isinstance(format, ResidualCodec):
        tokens = _encoded(values, live, format)
    elif format == "fp8":
        tokens = _to_fp8(values, live, largest, _scale)
    else:
        if not per_token:
            largest = _largest_of_documents(largest, document, live, batch)
        scales = largest / torch.full_like(largest, _INT8_MAX)
        tokens = Int8(torch.empty(values.shape, dtype=torch.int8, device=batch.device), scales, per_token)
        for rows in chunks(*values.shape):
            scale = scales[rows] if per_token else scales[document[rows]] if len(batch) else scales.new_zeros(1)
            tokens.values[rows] = _whole(_live(values, live, rows), scale)
    return CompressedBatch(tokens, batch.starts, batch.lengths, batch.max_length, batch.keep, batch.gapless)


@torch.no_grad()
def rounded_queries(values: Tensor, format: str) -> tuple[Tensor, Tensor]:
    """Query vectors ``[T, d]`` rounded to a format, and a scale for each token, float32 ``[T]``.

    ``"int8"``: whole numbers; the largest of a token is 127. ``"fp8"``: float8_e4m3fn; the scale is a power of two, and
    the largest number lies in (224, 448]. A token of zeros has scale 0; one with NaN or infinity has scale NaN and
    zeros. The same on every device, and does not wait for it.
    """
    dtype = torch.int8 if format == "int8" else torch.float8_e4m3fn
    rounded = torch.empty(values.shape, dtype=dtype, device=values.device)
    scales = torch.empty(len(values), dtype=torch.float32, device=values.device)
    for rows in chunks(*values.shape):
        numbers = values[rows].float()
        largest = numbers.abs().amax(dim=1)
        finite = largest.isfinite()
        largest = largest.where(finite, 0)
        numbers = numbers.where(finite[:, None], 0)
        if format == "int8":
            # By a tensor, because a GPU multiplies with the inverse of a number.
            scale = largest / torch.full_like(largest, _INT8_MAX)
            rounded[rows] = _whole(numbers, scale)
        else:
            scale = _fitting_powers(largest)
            # The inverse is a power of two as well.
            rounded[rows] = (numbers * scale.reciprocal().where(scale > 0, 0)[:, None]).to(dtype)
        scales[rows] = scale.where(finite, torch.nan)
    return rounded, scales


def _documents_of_rows(batch: TokenBatch | CompressedBatch, rows: int) -> tuple[Tensor, Tensor]:
    """Document of each row, int64 ``[T]`` (any where it has none), and which rows have one. Does not wait for the device.

    Of documents that share all of their rows it is the last.
    """
    row = torch.arange(rows, device=batch.device)
    if len(batch) == 0:
        return torch.zeros_like(row), torch.zeros_like(row, dtype=torch.bool)
    # An empty document takes no row from another that starts there.
    starts, order = torch.where(batch.lengths > 0, batch.starts, -1).sort(stable=True)
    document = order[(torch.searchsorted(starts, row, right=True) - 1).clamp_(min=0)]
    first = batch.starts[document]
    return document, (row >= first) & (row < first + batch.lengths[document])


def _live(values: Tensor, live: Tensor, rows: slice) -> Tensor:
    """Rows in float32, zeros where they do not count."""
    return values[rows].float().where(live[rows, None], 0)


def _largest_of_documents(largest: Tensor, document: Tensor, live: Tensor, batch: TokenBatch) -> Tensor:
    """Largest magnitude in each document, ``[N]``, from those of rows; documents with the same rows have the same."""
    if len(batch) == 0 or len(largest) == 0:
        return largest.new_zeros(len(batch))
    found = largest.new_zeros(len(batch)).scatter_reduce_(0, document, largest.where(live, 0), "amax")
    # The one that the rows were counted for.
    counted = document[batch.starts.clamp(max=len(document) - 1)]
    return torch.where(batch.lengths > 0, found[counted], 0)


def _whole(numbers: Tensor, scales: Tensor) -> Tensor:
    """Numbers over the scale of their row, rounded half to even, as int8."""
    # Only where scales are subnormal is a quotient above 127, and only where they are 0 is it not finite.
    whole = (numbers / scales[:, None]).round_().clamp_(-_INT8_MAX, _INT8_MAX)
    return whole.where((scales > 0)[:, None], 0).to(torch.int8)


def _fitting_powers(largest: Tensor) -> Tensor:
    """For each number, float32, the least power of two that it is at most 448 times of; 0 for 0.

    Made from the bits of the number, which is exact on every device. 448 is 1.75 * 2**8, so that a fraction above 1.75
    needs the next power. None is below 2**-126, the least number that is not subnormal.
    """
    exponent = (largest.view(torch.int32) + 0x1FFFFF >> 23) - 8
    return (exponent.clamp(min=1) << 23).view(torch.float32).where(largest > 0, 0)


def _to_fp8(values: Tensor, live: Tensor, largest: Tensor, scale: float | None) -> Fp8:
    most = float(largest.max()) if len(largest) else 0.0
    if scale is None:
        usual = most == 0 or _FP8_LEAST <= most <= _FP8_MAX * _FP8_SCALE
        scale = _FP8_SCALE if usual else float(_fitting_powers(torch.tensor(most, device="cpu")))
    tokens = Fp8(torch.empty(values.shape, dtype=torch.float8_e4m3fn, device=values.device), scale)
    for rows in chunks(*values.shape):
        tokens.values[rows] = (_live(values, live, rows) / scale).to(torch.float8_e4m3fn)
    return tokens


def _encoded(values: Tensor, live: Tensor, codec: ResidualCodec) -> Residual:
    parts = [codec.encode(_live(values, live, rows)) for rows in chunks(*values.shape) or [slice(0)]]
    return Residual(*map(torch.cat, zip(*parts, strict=True)), codec)
