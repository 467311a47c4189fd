"""A batch of sparse vectors over a vocabulary: what sparse search takes as queries and as documents."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TypeAlias

import numpy as np
import scipy.sparse
import torch
from torch import Tensor

from pylate_fastmaxsim._checks import converted_batches, require_count, require_tensor
from pylate_fastmaxsim._impacts import Paths, read_columns

# Numbers of terms are int32, or uint16 where they fit.
LARGEST_VOCABULARY = 1 << 31
LARGEST_OF_UINT16 = 1 << 16
# PyTorch has few operators on uint16. What only moves terms moves the same bits as signed numbers.
_BITS = {torch.uint16: torch.int16, torch.int32: torch.int32}


@dataclass(frozen=True, eq=False)
class SparseBatch:
    """N sparse vectors over one vocabulary, stored back to back, as the rows of a CSR matrix.

    Vector ``i`` has the terms ``terms[offsets[i] : offsets[i + 1]]`` with the weights of the same places. All other terms
    weigh 0. The vectors of a model come from :meth:`from_torch`, :meth:`from_scipy` and the other constructors, which sort,
    add up repeated terms and drop weights of 0; here all that is required. Nothing changes a batch, so threads may share it.

    Parameters
    ----------
    offsets
        First entry of each vector and the end of the last one, ``[N + 1]``, int64, from 0 to P.
    terms
        Numbers of terms, ``[P]``, int32 or uint16, from 0 to ``vocabulary`` - 1, ascending within a vector, each at most
        once.
    weights
        ``[P]``, float32 or float16, finite and above 0.
    vocabulary
        Number of terms that there are, 1 to 2,147,483,648.

    Raises
    ------
    ValueError
        A shape, dtype, device or number is not as above.
    TypeError
        An argument is not a tensor, or ``vocabulary`` is no integer.

    Examples
    --------
    >>> from pylate_fastmaxsim import SparseBatch
    >>> batch = SparseBatch.from_lists([[(7, 0.5), (2, 1.5)], [], [(7, 1.0)]], vocabulary=30522)
    >>> len(batch), batch.offsets.tolist(), batch.terms.tolist(), batch.weights.tolist()
    (3, [0, 2, 2, 3], [2, 7, 7], [1.5, 0.5, 1.0])
    """

    offsets: Tensor
    terms: Tensor
    weights: Tensor
    vocabulary: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "vocabulary", _vocabulary("SparseBatch", self.vocabulary))
        for name, allowed, dtypes in (
            ("offsets", "int64 [N + 1]", (torch.int64,)),
            ("terms", "int32 or uint16 [P]", (torch.int32, torch.uint16)),
            ("weights", "float32 or float16 [P]", (torch.float32, torch.float16)),
        ):
            device = getattr(self.offsets, "device", None)
            require_tensor("SparseBatch", name, getattr(self, name), allowed, 1, dtypes, device)
        if self.offsets.shape[0] < 1 or self.terms.shape != self.weights.shape:
            raise ValueError(
                "SparseBatch: offsets must be [N + 1], terms and weights both [P], got shapes "
                f"{tuple(self.offsets.shape)}, {tuple(self.terms.shape)} and {tuple(self.weights.shape)}."
            )
        self._check_numbers()
        object.__setattr__(self, "weights", self.weights.detach())  # no search passes gradients

    def _check_numbers(self) -> None:
        first, last, entries = int(self.offsets[0]), int(self.offsets[-1]), self.terms.shape[0]
        if first != 0 or last != entries or bool((self.offsets.diff() < 0).any()):
            raise ValueError(
                f"SparseBatch: offsets must rise from 0 to P = {entries}, got {first} to {last}"
                f"{'' if first or last != entries else ' with a step below 0'}."
            )
        rows, terms = _rows(self.offsets), self.terms.long()
        outside = (terms < 0) | (terms >= self.vocabulary)
        _refuse("SparseBatch", outside, f"terms must be from 0 to {self.vocabulary - 1}", terms, rows, terms)
        same_row = rows[1:] == rows[:-1]
        back = torch.zeros_like(outside)
        back[1:] = same_row & (terms[1:] <= terms[:-1])
        _refuse("SparseBatch", back, "terms must ascend within a vector and not repeat", terms, rows, terms)
        weights = self.weights
        wrong = ~(weights.isfinite() & (weights > 0))
        _refuse("SparseBatch", wrong, "weights must be finite and above 0", weights, rows, terms)

    @classmethod
    def _trusted(cls, offsets: Tensor, terms: Tensor, weights: Tensor, vocabulary: int) -> SparseBatch:
        """The batch of arguments that are known to be right. Nothing is checked, nothing waits for the device."""
        batch = object.__new__(cls)
        vars(batch).update(offsets=offsets, terms=terms, weights=weights, vocabulary=vocabulary)
        return batch

    def __reduce__(self) -> tuple:
        # PyTorch cannot unpickle tensors of uint16.
        bits = self.terms.view(_BITS[self.terms.dtype])
        return _unpickled, (self.offsets, bits, self.terms.dtype, self.weights, self.vocabulary)

    def __len__(self) -> int:
        return self.offsets.shape[0] - 1

    @property
    def device(self) -> torch.device:
        return self.weights.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights."""
        return self.weights.dtype

    @property
    def nbytes(self) -> int:
        """Bytes that the three tensors hold."""
        return self.offsets.nbytes + self.terms.nbytes + self.weights.nbytes

    def to(self, device: torch.device | str | int) -> SparseBatch:
        """Copy the vectors to another device; themselves if they are there."""
        tensors = (tensor.to(device) for tensor in (self.offsets, self.terms, self.weights))
        return self._trusted(*tensors, self.vocabulary)

    def select(self, index: Tensor) -> SparseBatch:
        """The vectors ``index`` (int64 ``[M]``, repeats allowed), in that order, as a copy.

        Raises
        ------
        IndexError
            One is out of range; on a GPU an assertion of PyTorch fails.

        Examples
        --------
        >>> import torch
        >>> from pylate_fastmaxsim import SparseBatch
        >>> batch = SparseBatch.from_lists([[(0, 1.0)], [(1, 2.0)]], vocabulary=2)
        >>> batch.select(torch.tensor([1, 0, 1])).weights.tolist()
        [2.0, 1.0, 2.0]
        """
        lengths = self.offsets.diff()[index]
        offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        places = torch.repeat_interleave(self.offsets[:-1][index] - offsets[:-1], lengths)
        places += torch.arange(places.shape[0], device=self.device)
        terms = self.terms.view(_BITS[self.terms.dtype])[places].view(self.terms.dtype)
        return self._trusted(offsets, terms, self.weights[places], self.vocabulary)

    @classmethod
    def concatenate(cls, batches: Iterable[SparseBatch]) -> SparseBatch:
        """All vectors of several batches in one, in their order.

        float16 weights beside float32 ones become float32, uint16 terms beside int32 ones int32.

        Raises
        ------
        ValueError
            There is no batch, or one differs from the first in vocabulary or device.

        Examples
        --------
        >>> from pylate_fastmaxsim import SparseBatch
        >>> batch = SparseBatch.from_lists([[(0, 1.0)], []], vocabulary=2)
        >>> SparseBatch.concatenate([batch, batch]).offsets.tolist()
        [0, 1, 1, 2, 2]
        """
        batches = list(batches)
        if not batches:
            raise ValueError("SparseBatch.concatenate: an empty list has no vocabulary; pass at least one SparseBatch.")
        first = batches[0]
        for batch in batches:
            if batch.vocabulary != first.vocabulary or batch.device != first.device:
                raise ValueError(
                    "SparseBatch.concatenate: all batches must have the vocabulary and the device of the first, got "
                    f"{first.vocabulary} on {first.device} and {batch.vocabulary} on {batch.device}."
                )
        offsets, entries = [first.offsets[:1]], 0
        for batch in batches:
            offsets.append(batch.offsets[1:] + entries)
            entries += batch.terms.shape[0]
        terms = [batch.terms for batch in batches]
        if len({each.dtype for each in terms}) > 1:
            terms = [each.int() for each in terms]
        dtype = terms[0].dtype
        joined = torch.cat([each.view(_BITS[dtype]) for each in terms]).view(dtype)
        weights = torch.cat([batch.weights for batch in batches])
        return cls._trusted(torch.cat(offsets), joined, weights, first.vocabulary)

    @classmethod
    def from_scipy(cls, matrix: scipy.sparse.sparray | scipy.sparse.spmatrix) -> SparseBatch:
        """The rows of a SciPy matrix or array ``[N, vocabulary]`` of any sparse format, on the CPU.

        Entries for one place are added up in float64. Weights become float32. ValueError if the shape has not two
        dimensions, weights are no real numbers, or one is negative or not finite; TypeError if it is not of SciPy.

        Examples
        --------
        >>> import scipy.sparse
        >>> from pylate_fastmaxsim import SparseBatch
        >>> SparseBatch.from_scipy(scipy.sparse.csr_array([[0.0, 2.0], [3.0, 0.0]])).terms.tolist()
        [1, 0]
        """
        return cls._from_scipy("SparseBatch.from_scipy", matrix)

    @classmethod
    def _from_scipy(cls, where: str, matrix: object) -> SparseBatch:
        if not scipy.sparse.issparse(matrix):
            raise TypeError(f"{where}: matrix must be a sparse matrix of SciPy, got {type(matrix).__name__}.")
        if len(matrix.shape) != 2:
            raise ValueError(f"{where}: matrix must be [N, vocabulary], got shape {matrix.shape}.")
        if matrix.format in ("csr", "csc"):
            # The way to COO writes where indptr says, wherever that is.
            try:
                matrix.check_format()
            except ValueError as error:
                raise ValueError(f"{where}: the matrix is damaged: {error}.") from None
        # Not by CSR, which would add up repeated entries in the dtype of the matrix.
        entries = matrix.tocoo()
        if entries.dtype.kind not in "fiub":
            raise ValueError(f"{where}: weights must be real numbers, got {entries.dtype}.")
        weights = entries.data if entries.dtype == np.float32 else entries.data.astype(np.float64)
        rows, terms, weights = map(torch.as_tensor, (entries.row, entries.col, weights))
        return cls._from_entries(where, rows, terms, weights, *matrix.shape)

    @classmethod
    def from_torch(cls, tensor: Tensor) -> SparseBatch:
        """The rows of a tensor ``[N, vocabulary]``, sparse (COO, CSR or CSC) or dense, on its device.

        Takes what ``SparseEncoder.encode`` of Sentence Transformers returns; a vector ``[vocabulary]``, as of a single
        text, becomes a batch of one. Entries for one place are added up in float64. float16 is kept, all else becomes
        float32. Waits for the device.

        Raises
        ------
        ValueError
            The shape, layout or dtype is not as above, or a weight is negative or not finite.
        TypeError
            ``tensor`` is not one.

        Examples
        --------
        >>> import torch
        >>> from pylate_fastmaxsim import SparseBatch
        >>> SparseBatch.from_torch(torch.tensor([[0.0, 2.0], [3.0, 0.0]]).to_sparse()).terms.tolist()
        [1, 0]
        """
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"SparseBatch.from_torch: tensor must be one [N, vocabulary], got {type(tensor).__name__}; "
                "a list of vectors is torch.stack(vectors)."
            )
        return cls._from_torch("SparseBatch.from_torch", "tensor", tensor)

    @classmethod
    def _from_torch(cls, where: str, name: str, tensor: Tensor) -> SparseBatch:
        tensor = tensor.detach()
        if tensor.layout not in (torch.strided, torch.sparse_coo, torch.sparse_csr, torch.sparse_csc):
            raise ValueError(f"{where}: {name} must be COO, CSR, CSC or dense, got {tensor.layout}.")
        if tensor.dim() not in (1, 2) or (tensor.layout != torch.strided and tensor.dense_dim()):
            raise ValueError(f"{where}: {name} must be [N, vocabulary], got shape {tuple(tensor.shape)}.")
        # Not coalesced, which would add up repeated entries in the dtype of the tensor.
        entries = tensor.to_sparse_coo()
        places, weights = entries._indices(), entries._values()
        rows, terms = places if tensor.dim() == 2 else (torch.zeros_like(places[0]), places[0])
        if weights.is_complex():
            raise ValueError(f"{where}: weights must be real numbers, got {weights.dtype}.")
        if not weights.is_floating_point():
            weights = weights.double()
        count = tensor.shape[0] if tensor.dim() == 2 else 1
        return cls._from_entries(where, rows, terms, weights, count, tensor.shape[-1])

    @classmethod
    def from_lists(cls, rows: Iterable[Sequence[tuple[int, float]]], vocabulary: int) -> SparseBatch:
        """Vectors that are each a list of ``(term, weight)``, in any order, on the CPU in float32.

        Weights of a term that repeats are added up in float64. ValueError if a term is no integer from 0 to
        ``vocabulary`` - 1, or a weight is negative or not finite; TypeError if something in ``rows`` is no list of pairs.

        Examples
        --------
        >>> from pylate_fastmaxsim import SparseBatch
        >>> SparseBatch.from_lists([[(1, 0.5), (0, 1.0), (1, 2.0)]], vocabulary=2).weights.tolist()
        [1.0, 2.5]
        """
        where = "SparseBatch.from_lists"
        try:
            rows = list(rows)
            lengths = [len(row) for row in rows]
            pairs = [(term, weight) for term, weight in chain.from_iterable(rows)]
        except (TypeError, ValueError):
            raise TypeError(f"{where}: each of rows must be a list of pairs (term, weight).") from None
        return cls._from_columns(where, lengths, *(zip(*pairs, strict=True) if pairs else ((), ())), vocabulary)

    @classmethod
    def from_jsonl(cls, paths: Paths, vocabulary: Mapping[str, int] | int, *, size: int | None = None) -> SparseBatch:
        """The vectors in files of JSON lines as Anserini and Pyserini take them, on the CPU in float32.

        A line is an object with ``"id"`` and ``"vector"``, which maps tokens to weights; all else in it is passed over,
        blank lines too. Weights of a token that repeats are added up in float64.
        :func:`pylate_fastmaxsim.retrieval.impacts.read_impacts` reads in batches, and keeps the ids.

        Parameters
        ----------
        paths
            A file, plain or gzip, a folder of them, or several of either. Of a folder the files that end in ``.jsonl``,
            ``.json``, ``.jsonl.gz`` or ``.json.gz`` are read, in the order of their names.
        vocabulary
            Number of each token, such as ``tokenizer.get_vocab()``. Or how many terms there are, where the tokens are
            numbers themselves.
        size
            Number of terms, if a model counts more than its tokenizer. By default the largest number in ``vocabulary``
            plus 1.

        Raises
        ------
        ValueError
            A line is not as above or not whole, a token is not in the vocabulary, or a weight is negative or not finite:
            named by file and line. ``size`` is too small, or a folder holds no such file.
        TypeError
            ``vocabulary`` is neither.
        FileNotFoundError
            A file is not there.

        Examples
        --------
        >>> from pathlib import Path
        >>> from pylate_fastmaxsim import SparseBatch
        >>> _ = Path("docs.jsonl").write_text('{"id": "7", "contents": "", "vector": {"sea": 1.5, "sky": 0.25}}')
        >>> SparseBatch.from_jsonl("docs.jsonl", {"sky": 0, "sea": 1}).weights.tolist()
        [0.25, 1.5]
        """
        where = "SparseBatch.from_jsonl"
        size, batches = read_columns(where, paths, vocabulary, size, batch_size=16384)
        none = [cls._from_columns(where, (), (), (), size)]
        return cls.concatenate(none + [cls._from_columns(where, *columns, size) for _, *columns in batches])

    @classmethod
    def from_npz(cls, path: str | os.PathLike) -> SparseBatch:
        """The rows of the matrix ``[N, vocabulary]`` in a file of ``scipy.sparse.save_npz``, as :meth:`from_scipy`.

        ValueError if the file is damaged or another one, FileNotFoundError if it is not there.

        Examples
        --------
        >>> import scipy.sparse
        >>> from pylate_fastmaxsim import SparseBatch
        >>> scipy.sparse.save_npz("docs.npz", scipy.sparse.csr_array([[0.0, 2.0], [3.0, 0.0]]))
        >>> SparseBatch.from_npz("docs.npz").terms.tolist()
        [1, 0]
        """
        try:
            matrix = scipy.sparse.load_npz(path)
        except (FileNotFoundError, PermissionError):
            raise
        except Exception as error:  # a damaged file meets any code of NumPy, SciPy and zipfile
            raise ValueError(
                f"SparseBatch.from_npz: {os.fspath(path)} must be a file of scipy.sparse.save_npz, "
                "but is another or damaged."
            ) from error
        return cls._from_scipy(f"SparseBatch.from_npz: {os.fspath(path)}", matrix)

    @classmethod
    def _from_columns(
        cls, where: str, lengths: Sequence[int], terms: Sequence[int], weights: Sequence[float], vocabulary: int
    ) -> SparseBatch:
        """Vectors of ``lengths`` entries each, whose terms and weights lie back to back in plain sequences."""
        terms = np.asarray(terms) if len(terms) else np.empty(0, np.int64)
        if terms.dtype.kind not in "iu":
            raise ValueError(f"{where}: terms must be integers, got {terms.dtype}.")
        weights = np.asarray(weights)
        if weights.dtype.kind not in "iuf":
            raise ValueError(f"{where}: weights must be real numbers, got {weights.dtype}.")
        weights = torch.as_tensor(weights.astype(np.float64))
        rows = np.repeat(np.arange(len(lengths)), lengths)
        terms = torch.as_tensor(terms.astype(np.int64))
        return cls._from_entries(where, torch.as_tensor(rows), terms, weights, len(lengths), vocabulary)

    @classmethod
    def _from_entries(
        cls, where: str, rows: Tensor, terms: Tensor, weights: Tensor, count: int, vocabulary: int
    ) -> SparseBatch:
        """Vectors of entries in any order: checked, sorted, added up, rounded, and without zeros."""
        vocabulary = _vocabulary(where, vocabulary)
        dtype = torch.float16 if weights.dtype == torch.float16 else torch.float32
        rows, terms = rows.long(), terms.long()
        outside = (terms < 0) | (terms >= vocabulary)
        _refuse(where, outside, f"terms must be from 0 to {vocabulary - 1}, the vocabulary", terms, rows, terms)
        allowed = f"weights must be at least 0 and finite in {str(dtype).removeprefix('torch.')}"
        _refuse(where, ~(weights >= 0), allowed, weights, rows, terms)
        if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < count:
            raise ValueError(
                f"{where}: entries must be of vectors 0 to {count - 1}, got {int(rows.min())} to {int(rows.max())}."
            )
        keys = rows * vocabulary + terms
        if not bool((keys.diff() > 0).all()):
            keys, order = keys.sort(stable=True)
            keys, group = keys.unique_consecutive(return_inverse=True)
            weights = weights[order]
            if len(keys) < len(weights):
                # NumPy adds in the order of the entries, where CUDA would in any, and rounds float64 to float16 once.
                sums = np.bincount(group.cpu().numpy(), weights.double().cpu().numpy())
                with np.errstate(over="ignore"):
                    sums = sums.astype(np.float16 if dtype == torch.float16 else np.float32)
                weights = torch.as_tensor(sums).to(keys.device)
        rows, terms, weights = keys // vocabulary, keys % vocabulary, weights.to(dtype)
        _refuse(where, ~weights.isfinite(), allowed, weights, rows, terms)
        positive = weights > 0
        if not bool(positive.all()):
            rows, terms, weights = rows[positive], terms[positive], weights[positive]
        offsets = torch.searchsorted(rows, torch.arange(count + 1, device=rows.device))
        return cls._trusted(offsets, terms.to(term_dtype(vocabulary)), weights, vocabulary)

    def to_scipy(self) -> scipy.sparse.csr_array:
        """The vectors as a CSR array of SciPy, ``[N, vocabulary]``, float32.

        Examples
        --------
        >>> from pylate_fastmaxsim import SparseBatch
        >>> SparseBatch.from_lists([[(1, 0.5)]], vocabulary=2).to_scipy().toarray()
        array([[0. , 0.5]], dtype=float32)
        """
        weights, terms, offsets = self.weights.float(), self.terms.int(), self.offsets
        arrays = (tensor.cpu().numpy() for tensor in (weights, terms, offsets))
        return scipy.sparse.csr_array(tuple(arrays), shape=(len(self), self.vocabulary))


# What sparse search takes: batches, matrices [N, vocabulary], or a vector [vocabulary] for each text.
# Quoted: SciPy has sparray from release 1.11 on.
SparseVectors: TypeAlias = "SparseBatch | Tensor | scipy.sparse.sparray | scipy.sparse.spmatrix | Sequence[Tensor]"


def as_sparse_batch(where: str, name: str, vectors: SparseVectors) -> SparseBatch:
    """Sparse vectors of any form as a batch; TypeError or ValueError unless they are one, a matrix or a list."""
    if isinstance(vectors, SparseBatch):
        return vectors
    if scipy.sparse.issparse(vectors):
        return SparseBatch._from_scipy(where, vectors)
    if isinstance(vectors, (list, tuple)) and vectors and all(isinstance(each, Tensor) for each in vectors):
        shapes = {(tuple(each.shape), each.dtype, each.device, each.layout) for each in vectors}
        if len(shapes) > 1 or vectors[0].dim() != 1:
            got = " and ".join(sorted(f"{dtype} {shape} on {device}" for shape, dtype, device, _ in shapes))
            raise ValueError(
                f"{where}: each of {name} must be [vocabulary], of one dtype, device and layout, got {got}."
            )
        vectors = torch.stack(tuple(vectors))
    if not isinstance(vectors, Tensor):
        raise TypeError(
            f"{where}: {name} must be a SparseBatch, a tensor [N, vocabulary], a matrix of SciPy or a list of tensors "
            f"[vocabulary], got {'an empty list' if isinstance(vectors, list) and not vectors else type(vectors).__name__}."
        )
    return SparseBatch._from_torch(where, name, vectors)


def sparse_batches(where: str, name: str, batches: object) -> Iterator[SparseBatch]:
    """One batch of documents or several, of any form."""
    return converted_batches(where, name, batches, (SparseBatch,), 1, partial(as_sparse_batch, where))


def _vocabulary(where: str, vocabulary: object) -> int:
    size = require_count(where, "vocabulary", vocabulary)
    if size > LARGEST_VOCABULARY:
        raise ValueError(f"{where}: vocabulary must be at most {LARGEST_VOCABULARY}, got {size}.")
    return size


def term_dtype(vocabulary: int) -> torch.dtype:
    """The smallest dtype of the numbers of so many terms."""
    return torch.uint16 if vocabulary <= LARGEST_OF_UINT16 else torch.int32


def _rows(offsets: Tensor) -> Tensor:
    """Number of the vector that each entry belongs to, ``[P]``, int64."""
    return torch.repeat_interleave(torch.arange(offsets.shape[0] - 1, device=offsets.device), offsets.diff())


def _unpickled(offsets: Tensor, bits: Tensor, dtype: torch.dtype, weights: Tensor, vocabulary: int) -> SparseBatch:
    return SparseBatch._trusted(offsets, bits.view(dtype), weights, vocabulary)


def _refuse(where: str, wrong: Tensor, allowed: str, values: Tensor, rows: Tensor, terms: Tensor) -> None:
    """Raise ValueError that names the first of the ``values`` that are ``wrong``. Waits for the device."""
    if bool(wrong.any()):
        place = int(wrong.int().argmax())
        raise ValueError(
            f"{where}: {allowed}, got {values[place].item()} (vector {int(rows[place])}, term {int(terms[place])})."
        )
