"""Sizes and layout of the documents of all ranks, exchanged before they are scored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from pylate_fastmaxsim.tokens import TokenBatch

# Each rank's part of a gathered mask begins at a multiple of this, so that kernels are compiled for aligned ones only.
_ALIGNED = 16

# The same order on every rank, so that an index can be sent.
_DTYPES = [value for value in vars(torch).values() if isinstance(value, torch.dtype)]


class DtypesDiffer(ValueError):
    """The documents of the ranks differ in dtype; ``widest`` can hold all of them. All ranks raise it."""

    def __init__(self, dtypes: list[torch.dtype]) -> None:
        super().__init__(
            f"maxsim across ranks: all must have documents of one dtype, got {', '.join(map(str, dtypes))}."
        )
        self.widest = reduce(torch.promote_types, dtypes)


class _Sizes(NamedTuple):
    """What is exchanged first: numbers of one rank, or tuples of those of all ranks."""

    rows: Any
    max_length: Any
    documents: Any
    dim: Any
    dtype: Any
    floored: Any


@dataclass(frozen=True)
class Shards:
    """Where the Nd documents of each of R ranks lie in its vectors.

    Parameters
    ----------
    rows
        Token vectors of each rank.
    max_lengths
        Of each rank an upper bound on the length of a document.
    starts, lengths
        As in :class:`~pylate_fastmaxsim.TokenBatch`, counted in each rank's own vectors, ``[R, Nd]``.
    keep
        ``[R, most]``, bool, with ``most`` at least the largest of ``rows``; False past a rank's rows.
    zero_floor
        ``[R, Nd]``, bool, or ``None``.
    """

    rows: list[int]
    max_lengths: list[int]
    starts: Tensor
    lengths: Tensor
    keep: Tensor
    zero_floor: Tensor | None


def rank_and_ranks() -> tuple[int, int]:
    """This process's rank and the number of ranks in the default process group; 0 and 1 without a group."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def describe(documents: TokenBatch, zero_floor: Tensor | None) -> Shards:
    """Exchange the layout of the documents of all ranks. Waits for the other ranks once.

    Raises
    ------
    ValueError
        The ranks differ in the number of documents, in d, in dtype or in whether there is a ``zero_floor``.
    """
    rows, dtype = len(documents.values), _DTYPES.index(documents.values.dtype)
    sizes = _Sizes(rows, documents.max_length, len(documents), documents.dim, dtype, zero_floor is not None)
    of_all = _Sizes(*zip(*_numbers_of_all(sizes, documents.device), strict=True))
    # Every rank raises the same error, before anything is sent in a size that another rank does not expect.
    for what, of_ranks in (
        ("have the same number of documents", of_all.documents),
        ("have documents of the same d", of_all.dim),
        ("give a zero_floor or none must", [bool(given) for given in of_all.floored]),
    ):
        if len(set(of_ranks)) > 1:
            raise ValueError(f"maxsim across ranks: all must {what}, got {', '.join(map(str, of_ranks))}.")
    if len(set(of_all.dtype)) > 1:
        raise DtypesDiffer([_DTYPES[dtype] for dtype in of_all.dtype])
    layout = [documents.starts, documents.lengths]
    if zero_floor is not None:
        layout.append(zero_floor.long())
    layouts = _all_gather(torch.stack(layout))
    keep = documents.keep
    if keep is None:
        keep = torch.ones(rows, dtype=torch.bool, device=documents.device)
    most = -(-max(of_all.rows) // _ALIGNED) * _ALIGNED
    return Shards(
        rows=list(of_all.rows),
        max_lengths=list(of_all.max_length),
        starts=layouts[:, 0],
        lengths=layouts[:, 1],
        keep=_all_gather(F.pad(keep, (0, most - rows))),
        zero_floor=None if zero_floor is None else layouts[:, 2] != 0,
    )


def _numbers_of_all(numbers: Sequence[int], device: torch.device) -> list[list[int]]:
    """The numbers of all ranks. Waits for the ranks, not for what the GPU is computing."""
    if device.type != "cuda":
        return _all_gather(torch.tensor(numbers, device=device)).tolist()
    # Otherwise the GPU would idle after the encoder's forward until the host has launched what follows.
    with torch.cuda.stream(_exchange_stream(device)):
        return _all_gather(torch.tensor(numbers, device=device)).tolist()


@lru_cache
def _exchange_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream for exchanges that need not wait for the computation."""
    return torch.cuda.Stream(device)


def _all_gather(tensor: Tensor) -> Tensor:
    """The tensors of all ranks, ``[R, ...]``."""
    _, ranks = rank_and_ranks()
    if ranks == 1:
        return tensor.unsqueeze(0)
    gathered = tensor.new_empty((ranks, *tensor.shape))
    dist.all_gather_into_tensor(gathered.view(-1), tensor.reshape(-1))
    return gathered
