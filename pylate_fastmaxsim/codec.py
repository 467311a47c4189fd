"""Residual codes of token vectors, as ColBERTv2 and PLAID store them: a centroid, and 1, 2 or 4 bits for each number."""

from __future__ import annotations

import functools
import json
import math
import os
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from pylate_fastmaxsim._checks import require_count, require_tensor
from pylate_fastmaxsim.files.replace import replace_file

FORMAT = "pylate-fastmaxsim residual codec 2"
BITS = (1, 2, 4)
_TENSORS = ("centroids", "weights", "cutoffs")

# Numbers that are handled at once, 64 MiB of float32: similarities to centroids, or decompressed vectors.
AT_ONCE = 1 << 24

# Vectors whose length is 1 within this are encoded as they are. That covers unit vectors rounded to bfloat16.
_UNIT = 2**-7

# As PLAID: vectors that the buckets are made from are not among those that the centroids are made from.
_HELD_OUT = 0.05
_MOST_HELD_OUT = 50_000
_MOST_OF_QUANTILE = 2**24 - 1  # numbers that torch.quantile takes


@dataclass(frozen=True, eq=False)
class ResidualCodec:
    """Centroids and buckets that residual codes of token vectors refer to.

    A vector becomes the id of the nearest centroid (by inner product) and, for each of its d numbers, a bucket of the
    difference to it. It is decompressed as centroid + bucket weights, scaled to its original length. Bytes and bits are
    in the order of PLAID's files. Nothing changes a codec, so threads may share it.

    Parameters
    ----------
    centroids
        ``[C, d]``, float16. d * bits must be a multiple of 8.
    weights
        Difference that a bucket stands for, ``[2**bits]``, float16, for 1, 2 or 4 bits.
    cutoffs
        Bounds between buckets, ``[2**bits - 1]``, float32, ascending. A number on a bound belongs to the lower bucket.

    Raises
    ------
    ValueError
        A shape, dtype or device is not the one above, or they hold NaN or infinity. The numbers are checked on a CPU
        only.
    TypeError
        An argument is not a tensor.

    Examples
    --------
    >>> import torch
    >>> from pylate_fastmaxsim import ResidualCodec
    >>> weights, cutoffs = torch.tensor([-0.5, -0.2, 0.2, 0.5]).half(), torch.tensor([-0.35, 0.0, 0.35])
    >>> codec = ResidualCodec(torch.eye(4).half(), weights, cutoffs)
    >>> codec.bits, codec.dim
    (2, 4)
    >>> codes, packed, scales = codec.encode(torch.tensor([[0.8, 0.0, 0.6, 0.0]]))
    >>> codes, packed
    (tensor([0], dtype=torch.int32), tensor([[174]], dtype=torch.uint8))
    """

    centroids: Tensor
    weights: Tensor
    cutoffs: Tensor
    # Bucket weights of the numbers that each byte holds, in their order, [256, 8 // bits], float16.
    byte_values: Tensor = field(init=False, repr=False)
    # By device, made by `to`.
    copies: dict[torch.device, ResidualCodec] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        for name, allowed, dims, dtype in (
            ("centroids", "float16 [C, d]", 2, torch.float16),
            ("weights", "float16 [2**bits]", 1, torch.float16),
            ("cutoffs", "float32 [2**bits - 1]", 1, torch.float32),
        ):
            tensor = getattr(self, name)
            require_tensor(
                "ResidualCodec", name, tensor, allowed, dims, (dtype,), getattr(self.centroids, "device", None)
            )
            if tensor.is_cpu and not bool(tensor.isfinite().all()):
                raise ValueError(f"ResidualCodec: {name} must be finite, got NaN or infinity.")
        if len(self.weights) not in [2**bits for bits in BITS] or len(self.cutoffs) != len(self.weights) - 1:
            raise ValueError(
                "ResidualCodec: bits must be 1, 2 or 4, with 2**bits weights and 2**bits - 1 cutoffs, "
                f"got {len(self.weights)} weights and {len(self.cutoffs)} cutoffs."
            )
        if self.cutoffs.is_cpu and bool((self.cutoffs.diff() < 0).any()):
            raise ValueError("ResidualCodec: cutoffs must be ascending.")
        if self.dim * self.bits % 8:
            raise ValueError(
                f"ResidualCodec: d * bits must be a multiple of 8, got d = {self.dim} and {self.bits} bits."
            )
        object.__setattr__(self, "byte_values", self.weights[_buckets_of_bytes(self.bits).to(self.device)])
        object.__setattr__(self, "copies", {self.device: self})

    @property
    def bits(self) -> int:
        """Bits of each number: 1, 2 or 4."""
        return len(self.weights).bit_length() - 1

    @property
    def dim(self) -> int:
        """Size d of a token vector."""
        return self.centroids.shape[1]

    @property
    def device(self) -> torch.device:
        return self.centroids.device

    @property
    def nbytes(self) -> int:
        """Memory of centroids and buckets."""
        return sum(tensor.nbytes for tensor in self._tensors)

    @functools.cached_property
    def checksum(self) -> str:
        """XXH3 of the numbers, 16 digits, equal on any device."""
        found = xxhash.xxh3_64()
        for tensor in self._tensors:
            found.update(f"{[*tensor.shape]}".encode())
            found.update(tensor.cpu().contiguous().view(torch.uint8).numpy())
        return found.hexdigest()

    def to(self, device: str | torch.device) -> ResidualCodec:
        """The codec on a device. A copy is made once for each."""
        device = torch.empty(0, device=device).device  # with the index of "cuda", which changes
        if device not in self.copies:
            with torch.inference_mode(False):  # it is kept, also for backwards
                self.copies[device] = ResidualCodec(*(tensor.to(device) for tensor in self._tensors))
        return self.copies[device]

    @property
    def _tensors(self) -> tuple[Tensor, ...]:
        return tuple(getattr(self, name) for name in _TENSORS)

    def __reduce__(self):
        # Without the copies on other devices, which a process that reads it may not have.
        return ResidualCodec, self._tensors

    @classmethod
    def train(
        cls, sample: Tensor, bits: int = 2, centroids: int | None = None, seed: int = 0, iterations: int = 10
    ) -> ResidualCodec:
        """Make a codec for vectors like those of a sample: k-means by fastkmeans, and quantiles of what is left.

        Differs from run to run on a GPU, whose sums have no fixed order.

        Parameters
        ----------
        sample
            Token vectors, ``[n, d]``, floating point, at least 2. k-means runs on the device where they are. A twentieth
            of them, at most 50,000, is left out of k-means; the buckets are made from these.
        bits
            1, 2 or 4 for each number.
        centroids
            How many. None: the largest power of two up to 16 * sqrt(n), as PLAID takes for n tokens. If the sample is
            much smaller than the corpus, pass the number for the corpus.
        seed
            Of the choice of vectors that k-means begins with.
        iterations
            Of k-means.

        Raises
        ------
        ValueError
            ``bits`` is another, d * bits is no multiple of 8, or the sample has not one finite vector for each centroid
            and one more.
        TypeError
            ``sample`` is not a tensor, or a number is no integer.
        ImportError
            fastkmeans is not installed.

        Examples
        --------
        >>> import torch
        >>> from pylate_fastmaxsim import ResidualCodec
        >>> sample = torch.nn.functional.normalize(torch.randn(500, 16), dim=-1)
        >>> codec = ResidualCodec.train(sample, bits=4, centroids=32)
        >>> codec.centroids.shape, codec.bits
        (torch.Size([32, 16]), 4)
        """
        where = "ResidualCodec.train"
        if bits not in BITS:
            raise ValueError(f"{where}: bits must be 1, 2 or 4, got {bits!r}.")
        _require_vectors(where, "sample", sample, "[n, d]")
        if not bool(sample.isfinite().all()):
            raise ValueError(f"{where}: sample must be finite, got NaN or infinity.")
        count, dim = sample.shape
        if dim * bits % 8:
            raise ValueError(f"{where}: d * bits must be a multiple of 8, got d = {dim} and {bits} bits.")
        held_out = min(max(1, int(_HELD_OUT * count)), _MOST_HELD_OUT, _MOST_OF_QUANTILE // max(1, dim))
        if centroids is None:
            centroids = min(2 ** int(math.log2(16 * math.sqrt(max(1, count)))), count - held_out)
        else:
            centroids = require_count(where, "centroids", centroids)
        if count < max(1, centroids) + 1:
            raise ValueError(
                f"{where}: sample must have at least one vector more than centroids, got {count} for {centroids}."
            )
        try:
            from fastkmeans import FastKMeans
        except ImportError as error:
            raise ImportError(f"{where} needs fastkmeans: pip install fastkmeans ({error}).") from None

        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(count, generator=generator).to(sample.device)
        held_out = min(held_out, count - centroids)
        vectors = _directions(sample.detach())[0]
        # fastkmeans seeds the generators of PyTorch and NumPy.
        state = np.random.get_state()  # noqa: NPY002
        with torch.random.fork_rng(range(torch.cuda.device_count())):
            means = FastKMeans(
                dim, centroids, niter=iterations, seed=seed, max_points_per_centroid=256, device=sample.device
            )
            means.train(vectors[order[held_out:]].float().cpu().numpy())
        np.random.set_state(state)  # noqa: NPY002
        means = F.normalize(torch.from_numpy(means.centroids).to(sample.device), dim=-1).half()
        vectors = vectors[order[:held_out]]
        residuals = (vectors - means[_nearest(vectors, means)]).float().flatten()
        options = 2**bits
        quantiles = torch.arange(options, device=sample.device) / options
        cutoffs = torch.quantile(residuals, quantiles[1:])
        weights = torch.quantile(residuals, quantiles + 0.5 / options)
        return cls(means, weights.half(), cutoffs)

    def encode(self, vectors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Codes of vectors ``[T, d]``, floating point, on the codec's device.

        Directions are rounded to float16, as in PLAID; lengths go into the scales.

        Returns
        -------
        codes
            Centroid of each vector, ``[T]``, int32.
        packed
            Buckets, ``[T, d * bits / 8]``, uint8.
        scales
            Length of the vector over the length of centroid + weights, ``[T]``, float32.

        Raises
        ------
        ValueError
            The vectors have another d or device, or are no floating point matrix.
        TypeError
            ``vectors`` is not a tensor.
        """
        _require_vectors("ResidualCodec.encode", "vectors", vectors, "[T, d]")
        self.require_fitting("ResidualCodec.encode", vectors)
        codes = torch.empty(len(vectors), dtype=torch.int32, device=self.device)
        packed = torch.empty(len(vectors), self.dim * self.bits // 8, dtype=torch.uint8, device=self.device)
        scales = torch.empty(len(vectors), dtype=torch.float32, device=self.device)
        for rows in chunks(len(vectors), self.dim):
            unit, norms = _directions(vectors[rows].detach())
            nearest = _nearest(unit, self.centroids)
            buckets = torch.bucketize((unit - self.centroids[nearest]).float(), self.cutoffs, out_int32=True)
            codes[rows], packed[rows] = nearest, _packed(buckets, self.bits)
            sums = decoded_sums(codes[rows], packed[rows], self.centroids, self.byte_values)
            scales[rows] = norms * _inverse(sums)
        return codes, packed, scales

    def decode(
        self, codes: Tensor, packed: Tensor, scales: Tensor | None, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """Vectors ``[T, d]`` of what :meth:`encode` returned, computed in float32 and rounded to ``dtype``.

        Without scales each has length 1, as in PLAID.
        """
        vectors = torch.empty(len(codes), self.dim, dtype=dtype, device=self.device)
        for rows in chunks(len(codes), self.dim):
            scale = None if scales is None else scales[rows]
            vectors[rows] = decoded(codes[rows], packed[rows], scale, self.centroids, self.byte_values)
        return vectors

    def require_fitting(self, where: str, vectors: Tensor) -> None:
        """Raise ValueError unless vectors have the codec's d and device."""
        if vectors.shape[1] != self.dim:
            raise ValueError(f"{where}: the codec is for d = {self.dim}, but the vectors have d = {vectors.shape[1]}.")
        if vectors.device != self.device:
            raise ValueError(
                f"{where}: the codec is on {self.device} and the vectors on {vectors.device}; use codec.to."
            )

    def save(self, file: str | os.PathLike) -> None:
        """Write a safetensors file, which :meth:`load` reads. It appears under its name when it is complete.

        Raises
        ------
        ValueError
            There is something else than a regular file under the name.
        OSError
            Writing fails, as on a full disk. A file that was there before stays as it was.
        """
        tensors = {name: getattr(self, name).cpu().contiguous() for name in _TENSORS}
        # One key, since safetensors writes several in random order.
        about = json.dumps({"format": FORMAT, "checksum": self.checksum})
        replace_file(Path(file), save(tensors, {"codec": about}))

    @classmethod
    def load(cls, file: str | os.PathLike) -> ResidualCodec:
        """Read what :meth:`save` wrote, on the CPU.

        Raises
        ------
        ValueError
            The file is no codec, or is damaged.
        OSError
            It cannot be read, as a FileNotFoundError if there is none.
        """
        with open(file, "rb"):  # whose errors say more than those of safetensors
            pass
        try:
            with safe_open(file, framework="pt") as opened:
                about = json.loads((opened.metadata() or {}).get("codec", "{}"))
                codec = cls(*(opened.get_tensor(name) for name in _TENSORS)) if about.get("format") == FORMAT else None
        except (SafetensorError, OSError, ValueError, AttributeError, RuntimeError, TypeError):
            about, codec = {}, None
        if codec is None or codec.checksum != about.get("checksum"):
            raise ValueError(
                f"ResidualCodec.load: {file} is damaged, or no codec of the format {FORMAT!r}; put it back as "
                "ResidualCodec.save wrote it, or make a codec and encode with it again."
            )
        return codec


def _require_vectors(where: str, name: str, vectors: Tensor, shape: str) -> None:
    require_tensor(where, name, vectors, shape)
    if vectors.dim() != 2 or not vectors.is_floating_point():
        raise ValueError(
            f"{where}: {name} must be floating point {shape}, got {vectors.dtype} of shape {tuple(vectors.shape)}."
        )


def decoded(codes: Tensor, packed: Tensor, scales: Tensor | None, centroids: Tensor, byte_values: Tensor) -> Tensor:
    """Vectors ``[n, d]`` of residual codes, float32, of length 1 without scales; all at once, so for few."""
    sums = decoded_sums(codes, packed, centroids, byte_values)
    return sums.mul_((_inverse(sums) if scales is None else scales)[:, None])


def decoded_sums(codes: Tensor, packed: Tensor, centroids: Tensor, byte_values: Tensor) -> Tensor:
    """Centroids + bucket weights, ``[n, d]``, float32."""
    return byte_values.float()[packed.long()].flatten(1).add_(centroids[codes.long()])


def _buckets_of_bytes(bits: int) -> Tensor:
    """Buckets of the numbers that each byte holds, ``[256, 8 // bits]``, int64.

    The order of PLAID: the first number is in the high bits, and of each number the lowest bit comes first.
    """
    bit = (torch.arange(256, device="cpu")[:, None] >> torch.arange(7, -1, -1, device="cpu")) & 1
    return (bit.unflatten(1, (-1, bits)) << torch.arange(bits, device="cpu")).sum(dim=-1)


def _packed(buckets: Tensor, bits: int) -> Tensor:
    """Bytes ``[n, d * bits / 8]`` of buckets ``[n, d]``."""
    place = torch.arange(bits, dtype=torch.uint8, device=buckets.device)
    bit = (buckets.to(torch.uint8)[..., None] >> place & 1).view(len(buckets), buckets.shape[1] * bits // 8, 8)
    return (bit << torch.arange(7, -1, -1, dtype=torch.uint8, device=bit.device)).sum(dim=-1, dtype=torch.uint8)


def chunks(rows: int, width: int, numbers: int | None = None) -> list[slice]:
    """The rows of a matrix in slices of at most so many numbers, ``AT_ONCE`` by default."""
    step = max(1, (numbers or AT_ONCE) // max(1, width))
    return [slice(begin, begin + step) for begin in range(0, rows, step)]


def _directions(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Vectors of length 1, float16, and their lengths, float32. Unit vectors stay as they are; zeros have length 0."""
    vectors = vectors.float()
    # In float64, which holds the square of every float32.
    norms = torch.linalg.vector_norm(vectors, dim=-1, dtype=torch.float64).float()
    divisor = norms.where(((norms - 1).abs() > _UNIT) & (norms > 0), 1)
    return (vectors / divisor[:, None]).half(), norms


def _nearest(vectors: Tensor, centroids: Tensor) -> Tensor:
    """Centroid with the largest inner product, ``[n]``, int64; the first of equal ones."""
    nearest = torch.empty(len(vectors), dtype=torch.int64, device=vectors.device)
    transposed = centroids.float().T
    with torch.autocast(vectors.device.type, enabled=False):
        for rows in chunks(len(vectors), len(centroids)):
            torch.argmax(vectors[rows].float() @ transposed, dim=1, out=nearest[rows])
    return nearest


def _inverse(sums: Tensor) -> Tensor:
    norms = torch.linalg.vector_norm(sums, dim=-1)
    return torch.where(norms > 0, 1 / norms, 0)
