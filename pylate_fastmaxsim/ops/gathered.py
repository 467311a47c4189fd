"""Documents of all ranks, gathered before they are scored, with gradients."""

from collections.abc import Sequence
from functools import lru_cache, reduce

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from pylate_fastmaxsim._dtypes import sum_dtype
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


def rank_and_ranks() -> tuple[int, int]:
    """This process's rank and the number of ranks in the default process group; 0 and 1 without a group."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def gather_documents(documents: TokenBatch, zero_floor: Tensor | None = None) -> tuple[TokenBatch, Tensor | None]:
    """The documents of all ranks of the default process group, those of rank 0 first, and their ``zero_floor``.

    The gradient of a document is the sum over all ranks, in float32 (float64 for float64 vectors). Every rank must take
    part, also in the backward. Waits for the other ranks once, not for the device.

    Parameters
    ----------
    documents
        The documents of this rank. Their number is the same on all ranks, their lengths are not.
    zero_floor
        As in :func:`~pylate_fastmaxsim.maxsim`, ``[Nd]``, bool; on all ranks or on none.

    Returns
    -------
    documents
        Those of all R ranks, ``R * Nd``. Their vectors are a copy unless there is one rank.
    zero_floor
        ``[R * Nd]``, bool, or ``None`` if none was given.

    Raises
    ------
    ValueError
        The ranks differ in the number of documents, in d, in dtype or in whether there is a ``zero_floor``.
    """
    _, ranks = rank_and_ranks()
    if ranks == 1:
        return documents, zero_floor
    rows, dtype = len(documents.values), _DTYPES.index(documents.values.dtype)
    sizes = [rows, documents.max_length, len(documents), documents.dim, dtype, zero_floor is not None]
    all_rows, max_lengths, counts, dims, dtypes, floored = zip(*_numbers_of_all(sizes, documents.device), strict=True)
    # Every rank raises the same error, before anything is sent in a size that another rank does not expect.
    for what, of_ranks in (
        ("have the same number of documents", counts),
        ("have documents of the same d", dims),
        ("give a zero_floor or none must", [bool(given) for given in floored]),
    ):
        if len(set(of_ranks)) > 1:
            raise ValueError(f"maxsim across ranks: all must {what}, got {', '.join(map(str, of_ranks))}.")
    if len(set(dtypes)) > 1:
        raise DtypesDiffer([_DTYPES[dtype] for dtype in dtypes])
    # Starts, lengths and floors, counted in each rank's own vectors: [R, 2 or 3, Nd].
    layout = [documents.starts, documents.lengths]
    if zero_floor is not None:
        layout.append(zero_floor.long())
    layouts = all_gather(torch.stack(layout))
    keep = documents.keep
    if keep is None:
        keep = torch.ones(rows, dtype=torch.bool, device=documents.device)
    most = -(-max(all_rows) // _ALIGNED) * _ALIGNED
    first = torch.arange(ranks, device=documents.device)[:, None] * most
    batch = TokenBatch(
        _Gather.apply(documents.values, most),
        (layouts[:, 0] + first).flatten(),
        layouts[:, 1].flatten(),
        max(max_lengths),
        all_gather(F.pad(keep, (0, most - rows))).flatten(),
    )
    return batch, None if zero_floor is None else (layouts[:, 2] != 0).flatten()


class _Gather(torch.autograd.Function):
    """The rows of all ranks, ``[R * most, d]``, gathered into one tensor without another copy."""

    @staticmethod
    def forward(ctx, values, most):
        _, ranks = rank_and_ranks()
        ctx.rows, ctx.dtype = len(values), values.dtype
        gathered = values.new_empty((ranks * most, values.shape[1]))
        dist.all_gather_into_tensor(gathered, F.pad(values, (0, 0, 0, most - len(values))).contiguous())
        return gathered

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        _, ranks = rank_and_ranks()
        gradient = gradient.to(sum_dtype(gradient.dtype)).contiguous()
        own = gradient.new_empty((len(gradient) // ranks, gradient.shape[1]))
        dist.reduce_scatter_tensor(own, gradient)
        return own[: ctx.rows].to(ctx.dtype), None


def _numbers_of_all(numbers: Sequence[int], device: torch.device) -> list[list[int]]:
    """The numbers of all ranks. Waits for the ranks, not for what the GPU is computing."""
    if device.type != "cuda":
        return all_gather(torch.tensor(numbers, device=device)).tolist()
    # Otherwise the GPU would idle after the encoder's forward until the host has launched what follows.
    with torch.cuda.stream(_exchange_stream(device)):
        return all_gather(torch.tensor(numbers, device=device)).tolist()


@lru_cache
def _exchange_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream for exchanges that need not wait for the computation."""
    return torch.cuda.Stream(device)


def all_gather(tensor: Tensor) -> Tensor:
    """The tensors of all ranks, ``[R, ...]``."""
    _, ranks = rank_and_ranks()
    if ranks == 1:
        return tensor.unsqueeze(0)
    gathered = tensor.new_empty((ranks, *tensor.shape))
    dist.all_gather_into_tensor(gathered.view(-1), tensor.reshape(-1))
    return gathered
