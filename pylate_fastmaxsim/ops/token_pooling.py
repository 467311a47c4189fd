"""Token pooling: fewer vectors for each document, the means of Ward's clusters of its tokens."""

import math

import torch
from torch import SymInt, Tensor

from pylate_fastmaxsim._checks import is_plain, require_count, require_integer
from pylate_fastmaxsim._dtypes import sum_dtype
from pylate_fastmaxsim.cpu import token_pooling as blocked
from pylate_fastmaxsim.ops.operands import (
    computed,
    path,
    refuse_shared_rows,
    refuse_transforms,
    require_vector_dtype,
)
from pylate_fastmaxsim.ops.pooled import live_counts
from pylate_fastmaxsim.ops.registered import Operator, differentiable
from pylate_fastmaxsim.tokens import TokenBatch, Tokens, as_batch


def pool_tokens(
    documents: Tokens,
    factor: float | None = None,
    *,
    count: int | None = None,
    protected: int = 0,
    normalize: bool = False,
    mask: Tensor | None = None,
) -> TokenBatch:
    """Pool the token vectors of each document hierarchically: ``max(n // factor, 1)`` means instead of n vectors.

    Ward's linkage on cosine distances ``1 - <x, y>``, cut into at most that many clusters, as
    ``scipy.cluster.hierarchy.linkage(method="ward")`` and ``fcluster(criterion="maxclust")`` do, and as PyLate's
    ``encode(pool_factor=...)`` and Sentence Transformers' ``HierarchicalTokenPooling`` use them. Vectors are expected to
    have length 1. Differentiable in the means: clusters are constants. Repeatable bit by bit.

    Parameters
    ----------
    documents
        Token vectors of N documents: a ``TokenBatch``, padded ``[N, L, d]``, or a list of ``[L_i, d]``. bfloat16, float16,
        float32 or float64.
    factor
        Tokens per vector of the result, at least 1; may be no integer.
    count
        Instead of ``factor``: clusters per document, at most.
    protected
        The first live tokens of each document that stay what they are and come first. PyLate and Sentence Transformers
        protect 1 by default.
    normalize
        ``True``: all vectors of the result have length 1, as by default in Sentence Transformers. PyLate leaves means as
        they are.
    mask
        With padded documents: tokens that count, ``[N, L]``, bool or 0/1, any pattern. ``None``: all.

    Returns
    -------
    TokenBatch
        Of the dtype of ``documents``. Protected tokens come first, then clusters in SciPy's order. Where distances are
        equal there may be fewer clusters than asked for, so lengths are known on the device only, and ``values`` has room
        to spare, filled with zeros.

    Raises
    ------
    ValueError
        Not exactly one of ``factor`` and ``count`` is given, one is out of range, or the dtype is another. On a CPU also: the
        mask holds more than 0 and 1, or documents share rows.
    TypeError
        An argument is of the wrong type.
    NotImplementedError
        The call is inside of torch.vmap, torch.func or forward-mode derivatives.

    Notes
    -----
    Distances and linkage are float64, since a rounded distance may change which clusters merge. Distances are cut to 0 to 2,
    and one that is NaN counts as 2. Sums of means are float32, or float64 for float64 input.

    Examples
    --------
    >>> import torch
    >>> from pylate_fastmaxsim import pool_tokens
    >>> document = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.8, 0.6], [0.0, 1.0]])
    >>> pooled = pool_tokens([document], 2)
    >>> pooled.to_padded()[0]
    tensor([[[0.0000, 1.0000],
             [0.9000, 0.3000]]])
    >>> pool_tokens([document], count=2, protected=1).lengths
    tensor([3])
    """
    refuse_transforms("pool_tokens")
    factor, count = _limits(factor, count)
    protected = require_integer("pool_tokens: protected", protected)
    if protected < 0:
        raise ValueError(f"pool_tokens: protected must be at least 0, got {protected}.")
    batch = as_batch("pool_tokens", "documents", documents, mask, "mask")
    require_vector_dtype("pool_tokens", "documents", batch.values)
    refuse_shared_rows("pool_tokens", "documents", batch.starts, batch.lengths, batch.gapless)
    number, tokens, longest = batch.starts.shape[0], batch.values.shape[0], batch.max_length
    # What the result needs room for, at most, so that nobody waits for the device.
    longest_pooled = protected + (max(_most(longest - protected, factor), 1) if factor else count)
    room = number * longest_pooled
    if factor:
        room = min(room, number * (protected + 1) + _most(tokens, factor))
    rows, starts, lengths = _clusters(
        batch.values.detach(), batch.starts, batch.lengths, batch.keep, longest, factor, count, protected
    )
    means, _ = _means(batch.values, rows, min(room, tokens))
    if normalize:
        means = torch.nn.functional.normalize(means, dim=-1)
    return TokenBatch(means.to(batch.values.dtype), starts, lengths, min(longest_pooled, longest))


def _limits(factor: float | None, count: int | None) -> tuple[float, int]:
    """Checked ``factor`` and ``count``, 0 for the one that is not given."""
    if (factor is None) == (count is None):
        raise ValueError("pool_tokens: give either factor or count.")
    if count is not None:
        return 0.0, require_count("pool_tokens", "count", count)
    return require_factor("pool_tokens", "factor", factor), 0


def require_factor(where: str, name: str, factor: object) -> float:
    """The tokens per vector of pooled documents. ValueError or TypeError if it is no number of at least 1."""
    try:
        number = float(factor)
    except (TypeError, ValueError):
        raise TypeError(f"{where}: {name} must be a number, at least 1, got {factor!r}.") from None
    if not 1 <= number < math.inf:
        raise ValueError(f"{where}: {name} must be at least 1 and finite, got {factor!r}.")
    return number


def _most(tokens: int | SymInt, factor: float) -> int | SymInt:
    """An upper bound on ``tokens // factor``, as an integer, also for a symbolic size of a graph."""
    return int(tokens // factor) if isinstance(tokens, int) else tokens // int(factor)


def _clusters_forward(
    values: Tensor, starts: Tensor, lengths: Tensor, keep: Tensor | None,
    max_length: int | SymInt, factor: float, count: int, protected: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Row of the result for each row of ``values``, -1 for none, and starts and lengths of the result."""
    live = live_counts(starts, lengths, keep)
    to_pool = (live - protected).clamp(min=0)
    # As Python's `//`, which the hosts use, also for a factor that is no integer.
    limits = (
        torch.div(to_pool.double(), factor, rounding_mode="floor").long() if factor else torch.full_like(live, count)
    )
    limits = to_pool.minimum(limits.clamp(min=1))
    room = live - to_pool + limits
    new_starts = room.cumsum(0) - room
    rows, clusters = path("token_pooling", blocked, values).clusters(
        values, starts, lengths, keep, live, to_pool, limits, new_starts, max(max_length - protected, 0)
    )
    return rows, new_starts, live - to_pool + clusters


def _clusters_fake(values, starts, lengths, keep, max_length, factor, count, protected):
    return starts.new_empty(values.shape[0]), torch.empty_like(starts), torch.empty_like(starts)


def _means_fake(values, rows, count):
    means = values.new_empty((count, values.shape[1]), dtype=sum_dtype(values.dtype))
    return means, rows.new_empty(count)


def _means_backward(grad: Tensor, rows: Tensor, sizes: Tensor, values: Tensor) -> Tensor:
    each = grad / sizes.clamp(min=1)[:, None]
    return each[rows.clamp(min=0)].masked_fill((rows < 0)[:, None], 0).to(values.dtype)


def _clusters(*arguments) -> tuple[Tensor, Tensor, Tensor]:
    call = _clusters_forward if is_plain(*arguments[:4]) else _clusters_operator.dispatched
    return call(*arguments)


_clusters_operator = Operator("token_clusters", _clusters_forward, _clusters_fake)
_means = differentiable(
    Operator("cluster_means", computed("token_pooling", blocked, "means"), _means_fake),
    ("means", "sizes"),
    ("values",),
    _means_backward,
)
