"""A ragged batch of token embeddings: the one data structure that every operator takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from pylate_fastmaxsim._checks import as_mask, converted_batches, has_numbers, require_integer, require_tensor


@dataclass(frozen=True, eq=False)
class TokenBatch:
    """N sequences of d-dimensional token vectors, stored back to back in one matrix.

    Padded tensors, packed tensors with ``cu_seqlens`` and lists of matrices become one, the first two without a copy
    where they are contiguous. Sequence ``i`` is the rows ``starts[i]`` to ``starts[i] + lengths[i] - 1`` of ``values``,
    of which those with ``keep`` count. Sequences may be in any order, with unused rows between them, but must not
    overlap.

    Parameters
    ----------
    values
        Token vectors, ``[T, d]``, floating point. The only differentiable part.
    starts
        First row of each sequence, ``[N]``, int64, on the device of ``values``.
    lengths
        Number of rows of each sequence, ``[N]``, int64, on the device of ``values``. May be 0.
    max_length
        An upper bound on ``lengths``, as a Python integer, so that sizes are known without waiting for the device.
    keep
        Which rows of ``values`` count, ``[T]``, bool; ``None`` means all of them.
    gapless
        ``True`` if every row of ``values`` belongs to exactly one sequence, which saves filling gradients with zeros.
        ``False`` if that is not known.

    Raises
    ------
    ValueError
        A shape, dtype or device is not the one above, or a sequence is longer than ``max_length`` or lies outside of
        ``values``. The numbers in ``starts`` and ``lengths`` are checked on a CPU only.
    TypeError
        An argument is not a tensor, or ``max_length`` is no integer.

    Examples
    --------
    >>> import torch
    >>> from pylate_fastmaxsim import TokenBatch
    >>> batch = TokenBatch.from_list([torch.ones(2, 4), torch.ones(3, 4)])
    >>> len(batch), batch.dim, batch.lengths.tolist()
    (2, 4, [2, 3])
    """

    values: Tensor
    starts: Tensor
    lengths: Tensor
    max_length: int
    keep: Tensor | None = None
    gapless: bool = False

    def __post_init__(self) -> None:
        require_tensor("TokenBatch", "values", self.values, "[T, d]", 2)
        if not self.values.is_floating_point():
            raise ValueError(f"TokenBatch: values must be floating point, got {self.values.dtype}.")
        object.__setattr__(self, "max_length", require_integer("TokenBatch: max_length", self.max_length))
        check_sequences("TokenBatch", "values", self, self.values.shape[0])

    def __len__(self) -> int:
        return self.starts.shape[0]

    @property
    def dim(self) -> int:
        """Size d of a token vector."""
        return self.values.shape[1]

    @property
    def device(self) -> torch.device:
        return self.values.device

    @classmethod
    def from_padded(cls, values: Tensor, mask: Tensor | None = None) -> TokenBatch:
        """View padded token vectors ``[N, L, d]`` as a ragged batch.

        Nothing is copied where they can be viewed as ``[N * L, d]``.

        Parameters
        ----------
        values
            Token vectors, ``[N, L, d]``, floating point.
        mask
            Tokens that count, ``[N, L]``, bool or 0/1 of any dtype, in any pattern. A sequence ends with its last live
            token, so that padding costs nothing. Or lengths of the sequences, ``[N]``, an integer dtype. ``None``: all.

        Raises
        ------
        ValueError
            A shape or dtype is not the one above, or a mask or lengths on a CPU hold something else.
        TypeError
            An argument is not a tensor.

        Examples
        --------
        >>> import torch
        >>> from pylate_fastmaxsim import TokenBatch
        >>> mask = torch.tensor([[1, 1, 0], [1, 0, 1]])
        >>> TokenBatch.from_padded(torch.ones(2, 3, 4), mask).lengths.tolist()
        [2, 3]
        """
        return cls._of_padded("TokenBatch.from_padded", "values", values, "mask", mask)

    @classmethod
    def _of_padded(cls, where: str, name: str, values: Tensor, mask_name: str, mask: Tensor | None) -> TokenBatch:
        """:meth:`from_padded` under the names that the caller's arguments have in the errors."""
        require_tensor(where, f"padded {name}", values, "[N, L, d]", 3)
        if not values.is_floating_point():
            raise ValueError(f"{where}: {name} must be floating point, got {values.dtype}.")
        count, length, dim = values.shape
        device = values.device
        starts = torch.arange(count, device=device) * length
        if mask is None:
            lengths = torch.full_like(starts, length)
            return cls(values.reshape(count * length, dim), starts, lengths, length, gapless=True)
        is_lengths = isinstance(mask, Tensor) and mask.dim() == 1 and mask.dtype in (torch.int32, torch.int64)
        allowed = "[N] = [{}] as lengths" if is_lengths else "[N, L] = [{}, {}], or int64 lengths [N]"
        require_tensor(where, mask_name, mask, allowed, (count,) if is_lengths else (count, length))
        if is_lengths:
            if has_numbers(mask) and bool((wrong := (mask < 0) | (mask > length)).any()):
                raise ValueError(
                    f"{where}: {mask_name} as lengths must be from 0 to L = {length}, got {mask[wrong][0]}."
                )
            return cls(values.reshape(count * length, dim), starts, mask.to(device, torch.int64), length)
        keep = as_mask(where, mask_name, mask, device)
        if length == 0:
            lengths = torch.zeros_like(starts)
        else:
            lengths = (keep * torch.arange(1, length + 1, device=device)).amax(dim=1)
        return cls(values.reshape(count * length, dim), starts, lengths, length, keep.reshape(-1))

    @classmethod
    def from_packed(
        cls, values: Tensor, cu_seqlens: Tensor, keep: Tensor | None = None, max_length: int | None = None
    ) -> TokenBatch:
        """View packed token vectors ``[T, d]`` with ``cu_seqlens [N + 1]`` as a ragged batch, without a copy.

        ``cu_seqlens`` is int32 or int64, and ``keep [T]`` bool or 0/1 of any dtype. ``max_length`` defaults to the
        longest sequence, which waits for the device once; pass the tokenizer's maximum length to avoid that.

        Raises
        ------
        ValueError
            A shape or dtype does not fit, ``cu_seqlens`` does not rise from 0 to at most T, a sequence is longer than
            ``max_length``, or that is not given in a graph. The numbers in ``cu_seqlens`` on a GPU are not looked at
            where it is given. ``keep`` on a CPU holds
            more than 0 and 1.
        TypeError
            An argument is not a tensor, or ``max_length`` is no integer.

        Examples
        --------
        >>> import torch
        >>> from pylate_fastmaxsim import TokenBatch
        >>> TokenBatch.from_packed(torch.ones(5, 4), torch.tensor([0, 2, 5])).lengths.tolist()
        [2, 3]
        """
        where, whole = "TokenBatch.from_packed", (torch.int32, torch.int64)
        require_tensor(where, "values", values, "[T, d]", 2)
        require_tensor(where, "cu_seqlens", cu_seqlens, "int32 or int64 [N + 1] and start with 0", 1, whole)
        if cu_seqlens.shape[0] < 1:
            raise ValueError(f"{where}: cu_seqlens must be [N + 1] and start with 0, got shape (0,).")
        if keep is not None:
            require_tensor(where, "keep", keep, "[T] with T = {}", (values.shape[0],))
            keep = as_mask(where, "keep", keep, values.device)
        if max_length is not None:
            max_length = require_integer(f"{where}: max_length", max_length)
        if max_length is None and torch.compiler.is_compiling():
            # Tiles and integer dtypes depend on it, and a graph has no number for it. A graph that may break leaves this
            # call outside.
            raise ValueError(
                "TokenBatch.from_packed: max_length must be passed where the call is compiled with fullgraph=True or exported."
            )
        if max_length is None or has_numbers(cu_seqlens):
            longest = _longest(cu_seqlens.cpu(), values.shape[0], max_length)
            max_length = longest if max_length is None else max_length
        # A copy, since the caller may reuse the buffer for the next batch.
        cu_seqlens = cu_seqlens.to(device=values.device, dtype=torch.int64, copy=True)
        return cls(values, cu_seqlens[:-1], cu_seqlens.diff(), max_length, keep)

    @classmethod
    def from_list(cls, sequences: Sequence[Tensor | np.ndarray]) -> TokenBatch:
        """Pack matrices ``[L_i, d]``, all of one d, dtype and device, into one, which is a copy.

        Takes what ``encode`` of PyLate and of a MultiVectorEncoder returns, tensors or arrays of NumPy.

        Raises
        ------
        ValueError
            There is none, or one is not a matrix or differs from the first in d, dtype or device.
        TypeError
            ``sequences`` is not a sequence of tensors or arrays.

        Examples
        --------
        >>> import torch
        >>> from pylate_fastmaxsim import TokenBatch
        >>> TokenBatch.from_list([torch.ones(1, 2), torch.ones(0, 2)]).lengths.tolist()
        [1, 0]
        """
        if not isinstance(sequences, Sequence):
            raise TypeError(
                f"TokenBatch.from_list: sequences must be a list of tensors [L, d], got {type(sequences).__name__}."
            )
        return cls._of_list("TokenBatch.from_list", "sequences", sequences)

    @classmethod
    def _of_list(cls, where: str, name: str, sequences: Sequence[Tensor | np.ndarray]) -> TokenBatch:
        """:meth:`from_list` under the name that the caller's argument has in the errors."""
        if not sequences:
            raise ValueError(f"{where}: {name} must hold at least one [L, d]; an empty list has no token dimension.")
        sequences = [_as_tensor(where, f"each of {name}", sequence) for sequence in sequences]
        for sequence in sequences:
            require_tensor(where, f"each of {name}", sequence, "[L, d]")
        layouts = [(sequence.shape, sequence.dtype, sequence.device) for sequence in sequences]
        first_shape, first_dtype, first_device = layouts[0]
        for shape, dtype, device in layouts:
            if len(shape) != 2 or shape[1] != first_shape[1] or dtype != first_dtype or device != first_device:
                raise ValueError(
                    f"{where}: each of {name} must be [L, d], of the d, dtype and device of the first, "
                    f"got {first_dtype} {tuple(first_shape)} on {first_device} "
                    f"and {dtype} {tuple(shape)} on {device}."
                )
        sizes = [shape[0] for shape, _, _ in layouts]
        lengths = torch.tensor(sizes, dtype=torch.int64, device=first_device)
        # Autocast to bfloat16 refuses to concatenate float16.
        with torch.autocast(first_device.type, enabled=False):
            values = torch.cat(sequences)
        return cls(values, lengths.cumsum(0) - lengths, lengths, max(sizes), gapless=True)

    def with_values(self, values: Tensor) -> TokenBatch:
        """Put other vectors ``[T, d']`` in the place of ``values``.

        Raises
        ------
        ValueError
            The number T of rows is another.
        TypeError
            ``values`` is not a tensor.
        """
        rows = self.values.shape[0]
        require_tensor("TokenBatch.with_values", "values", values, "[T, d] with T = {}, as before", (rows, None))
        return replace(self, values=values)

    def select(self, index: Tensor) -> TokenBatch:
        """The sequences ``index`` (int64, any length), in that order. No token is copied.

        Where gradients are wanted, an index must not repeat: never for queries, and for documents if they need gradients
        themselves. Repeat the vectors instead, or name documents more than once in ``candidates``. Scores check this, on
        a CPU only.

        The winners that are kept for a backward have an entry for each of the P documents or candidates and each of the
        T rows of the queries' ``values``, selected or not.
        """
        return replace(self, starts=self.starts[index], lengths=self.lengths[index], gapless=False)

    def to(self, device: str | torch.device, non_blocking: bool = False) -> TokenBatch:
        """The batch on a device; ``non_blocking`` as in ``torch.Tensor.to``."""
        return replace(self, **tensors_on(device, self, non_blocking))

    def to_padded(self) -> tuple[Tensor, Tensor]:
        """A copy padded with zeros, ``[N, max_length, d]``, and its mask ``[N, max_length]`` (bool).

        Examples
        --------
        >>> import torch
        >>> from pylate_fastmaxsim import TokenBatch
        >>> values, mask = TokenBatch.from_list([torch.ones(1, 2), torch.ones(2, 2)]).to_padded()
        >>> values.shape, mask.tolist()
        (torch.Size([2, 2, 2]), [[True, False], [True, True]])
        """
        offset = torch.arange(self.max_length, device=self.device)
        mask = offset < self.lengths[:, None]
        rows = torch.where(mask, self.starts[:, None] + offset, 0)
        if self.values.shape[0] == 0:
            return self.values.new_zeros(len(self), self.max_length, self.dim), mask
        if self.keep is not None:
            mask = mask & self.keep[rows]
        return self.values[rows].masked_fill(~mask[..., None], 0), mask


# What operators take: batches, padded vectors [N, L, d], also of the layout torch.jagged, or a matrix [L_i, d] for each text.
Tokens = TokenBatch | Tensor | np.ndarray | Sequence[Tensor | np.ndarray]


def as_batch(
    where: str, name: str, tokens: Tokens, mask: Tensor | None = None, mask_name: str | None = None
) -> TokenBatch:
    """Token vectors of any form as a ragged batch; TypeError or ValueError unless they are one, padded, or a list."""
    mask_name = mask_name or f"{name}_mask"
    if isinstance(tokens, Tensor) and tokens.layout == torch.jagged:
        lengths = tokens.lengths()  # where there are rows between sequences
        tokens = TokenBatch.from_packed(tokens.values(), tokens.offsets())
        tokens = tokens if lengths is None else replace(tokens, lengths=lengths.long())
    if isinstance(tokens, (TokenBatch, list, tuple)):
        if mask is not None:
            form = "list has no padding" if isinstance(tokens, (list, tuple)) else "TokenBatch carries its own `keep`"
            raise ValueError(f"{where}: {mask_name} goes with padded {name}; a {form}.")
        return tokens if isinstance(tokens, TokenBatch) else TokenBatch._of_list(where, name, tokens)
    if hasattr(tokens, "decompress"):
        raise TypeError(
            f"{where}: {name} are a CompressedBatch, which only maxsim, pooled_scores and search take, as documents; pass "
            f"{name}.decompress()."
        )
    tokens = _as_tensor(where, name, tokens)
    if not isinstance(tokens, Tensor):
        raise TypeError(
            f"{where}: {name} must be a TokenBatch, a tensor [N, L, d] or a list of matrices [L, d], got "
            f"{type(tokens).__name__}."
        )
    if tokens.dim() == 2:
        raise ValueError(
            f"{where}: {name} must be [N, L, d], got one text of shape {tuple(tokens.shape)}; pass it as x[None]."
        )
    return TokenBatch._of_padded(where, name, tokens, mask_name, mask)


def token_batches(where: str, name: str, batches: object, *kept: type) -> Iterator[TokenBatch]:
    """One batch of documents or several, of any form; those of the types ``kept`` stay what they are."""
    return converted_batches(where, name, batches, (TokenBatch, *kept), 2, partial(as_batch, where))


def _as_tensor(where: str, name: str, values: object) -> object:
    """An array of NumPy as a tensor that shares its memory; all else as it is."""
    if not isinstance(values, np.ndarray):
        return values
    if values.dtype not in (np.float16, np.float32, np.float64):
        raise ValueError(f"{where}: {name} must be floating point, got {values.dtype} of NumPy.")
    return torch.from_numpy(values)


def tensors_on(device: str | torch.device, batch: object, non_blocking: bool) -> dict[str, Tensor]:
    """The fields of a dataclass that are tensors, on a device."""
    # Not by `vars`, which a compiler does not trace.
    values = {field.name: getattr(batch, field.name) for field in fields(batch)}
    return {n: each.to(device, non_blocking=non_blocking) for n, each in values.items() if isinstance(each, Tensor)}


def check_sequences(where: str, name: str, batch: TokenBatch, rows: int) -> None:
    """Raise ValueError or TypeError unless the sequences of a batch fit the T ``rows`` of its ``name``.

    For every class with the fields ``starts``, ``lengths``, ``max_length``, ``keep``, ``gapless`` and ``device``.
    """
    starts, lengths, keep, device = batch.starts, batch.lengths, batch.keep, batch.device
    require_tensor(where, "starts", starts, "int64 [N]", 1, (torch.int64,), device)
    require_tensor(where, "lengths", lengths, "int64 [N], as starts", tuple(starts.shape), (torch.int64,), device)
    if keep is not None:
        require_tensor(where, "keep", keep, "bool [T] with T = {}", (rows,), (torch.bool,), device)
    if has_numbers(starts, lengths):
        if len(starts):
            _check_bounds(where, name, batch, rows)
        if batch.gapless and not _fills_all_rows(starts, lengths, rows):
            raise ValueError(
                f"{where}: with gapless every one of the T = {rows} rows of {name} must belong to one sequence, but some "
                "belong to several or to none."
            )


def _check_bounds(where: str, name: str, batch: TokenBatch, rows: int) -> None:
    shortest, longest = map(int, torch.aminmax(batch.lengths))
    if shortest < 0 or longest > batch.max_length:
        raise ValueError(
            f"{where}: lengths must be from 0 to max_length = {batch.max_length}, got {shortest} to {longest}."
        )
    first, end = map(int, torch.aminmax(batch.starts))
    if end <= rows:  # or the sum could overflow
        end = int((batch.starts + batch.lengths).max())
    if first < 0 or end > rows:
        raise ValueError(f"{where}: sequences must lie in the rows 0 to T = {rows} of {name}, got {first} to {end}.")


def _fills_all_rows(starts: Tensor, lengths: Tensor, rows: int) -> bool:
    starts, ends = _spans(starts, lengths)
    return [0, *ends.tolist()] == [*starts.tolist(), rows]


def share_rows(starts: Tensor, lengths: Tensor) -> bool:
    """True if a row belongs to two sequences. Waits for the device."""
    starts, ends = _spans(starts, lengths)
    return bool((starts[1:] < ends[:-1]).any())


def _spans(starts: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """First rows and ends of the sequences that are not empty, in the order of rows."""
    taken = lengths > 0
    starts, order = starts[taken].sort()
    return starts, starts + lengths[taken][order]


def _longest(cu_seqlens: Tensor, rows: int, max_length: int | None) -> int:
    """The longest sequence of ``cu_seqlens`` on a CPU, after all checks."""
    steps = cu_seqlens.diff()
    shortest, longest = map(int, torch.aminmax(steps)) if len(steps) else (0, 0)
    first, last = int(cu_seqlens[0]), int(cu_seqlens[-1])
    if first != 0 or last > rows or shortest < 0 or (max_length is not None and longest > max_length):
        limit = "" if max_length is None else f" to max_length = {max_length}"
        raise ValueError(
            f"TokenBatch.from_packed: cu_seqlens must go from 0 to at most T = {rows} in steps from 0{limit}, "
            f"got {first} to {last} in steps from {shortest} to {longest}."
        )
    return longest
