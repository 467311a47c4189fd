"""Scores with another pooling over document tokens than the maximum, as differentiable operators."""

import functools
from dataclasses import replace
from types import ModuleType

import torch
from torch import Tensor

from pylate_fastmaxsim._dtypes import sum_dtype
from pylate_fastmaxsim._operands import PoolingNumbers, ScoringOperands
from pylate_fastmaxsim._winners import winner_dtype
from pylate_fastmaxsim.compressed import CompressedBatch, Fp8, Int8
from pylate_fastmaxsim.cpu import pooled as blocked
from pylate_fastmaxsim.cpu.live_tokens import live_tokens
from pylate_fastmaxsim.cpu.maxsim import require_candidates
from pylate_fastmaxsim.ops.maxsim import maxsim
from pylate_fastmaxsim.ops.operands import (
    check_candidates,
    check_numbers,
    fake_gradients,
    fake_scores,
    logger,
    path,
    prepared,
    recording,
)
from pylate_fastmaxsim.ops.registered import Operator, differentiable
from pylate_fastmaxsim.pooling import LogSumExp, Max, Pooling, TopK, check_pooling
from pylate_fastmaxsim.tokens import TokenBatch, Tokens, as_batch

# Numbers of documents that are decompressed at once: 256 MiB of float32.
DECOMPRESSED_NUMBERS = 1 << 26


def pooled_scores(
    queries: Tokens,
    documents: Tokens | CompressedBatch,
    candidates: Tensor | None = None,
    *,
    pooling: Pooling,
    queries_mask: Tensor | None = None,
    documents_mask: Tensor | None = None,
    zero_floor: Tensor | None = None,
) -> Tensor:
    """Score queries against documents: each live query token pools its similarities to the live tokens of a document.

    ``score[i, j] = sum over live s of (pooling over live t of <q_is, d_jt>)``, without holding the similarities. Top-k
    keeps the positions of its k tokens for the backward; softmax and log-sum-exp keep one or two numbers for each query
    token and document, and compute the similarities again. Differentiable once in both arguments. A document without
    a live token scores 0 and passes no gradient. NaN in a live token gives NaN in every score that uses it. Repeatable
    bit by bit.

    Parameters
    ----------
    queries
        Nq queries: a ``TokenBatch``, or padded token vectors ``[Nq, Lq, d]``. bfloat16, float16, float32 or float64.
    documents
        Nd documents, likewise, of the same d, dtype and device, or as ``[Nq, K, Ld, d]`` K of each query. Or a
        ``CompressedBatch``, which another pooling than ``Max()`` decompresses to the dtype of the queries: 256 MiB at a
        time, which for each call takes as long as :meth:`~pylate_fastmaxsim.CompressedBatch.decompress`. A gradient of
        the queries keeps all of these vectors.
    candidates
        Which documents each query scores, ``[Nq, K]``, int64, indices from 0 to Nd - 1 in any order, repeats allowed.
        ``None``: all. The range is checked on a CPU only.
    pooling
        ``Max()``, ``TopK(k)``, ``Softmax(temperature)`` or ``LogSumExp(temperature)``. With ``Max()`` and ``TopK(1)``
        this is :func:`~pylate_fastmaxsim.maxsim`. Temperatures are in units of a similarity.
    queries_mask
        With padded queries: tokens that count, ``[Nq, Lq]``, bool or 0/1, any pattern. ``None``: all.
    documents_mask
        With padded documents: tokens that count, ``[Nd, Ld]``. ``None``: all.
    zero_floor
        As in :func:`~pylate_fastmaxsim.maxsim`, with ``Max()``. The other poolings, of which no library multiplies masked
        tokens by 0, leave these out and take no notice of it.

    Returns
    -------
    Tensor
        Scores, ``[Nq, Nd]``, or ``[Nq, K]`` with candidates; float32, or float64 for float64 input.

    Raises
    ------
    ValueError
        As in :func:`~pylate_fastmaxsim.maxsim`.
    TypeError
        An argument is of the wrong type.
    NotImplementedError
        Second derivatives are asked for, or the call is inside of torch.vmap, torch.func or forward-mode derivatives.

    Notes
    -----
    Autocast, float32 precision and sums are as in :func:`~pylate_fastmaxsim.maxsim`. The kernels take k up to 64 (up
    to 4 under Triton 3.3); a larger k is computed on the same device in blocks of PyTorch, which wait for it. With top-k a
    similarity of infinity may give NaN. Softmax pooling is that of "Spike hijacking in late-interaction retrieval".

    Examples
    --------
    >>> import torch
    >>> from pylate_fastmaxsim import LogSumExp, Softmax, TopK, pooled_scores
    >>> queries = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
    >>> documents = torch.tensor([[[1.0, 0.0], [0.0, 1.0], [0.5, 0.5]]])
    >>> pooled_scores(queries, documents, pooling=TopK(2))
    tensor([[1.5000]])
    >>> pooled_scores(queries, documents, pooling=Softmax(0.1))
    tensor([[1.9932]])
    >>> pooled_scores(queries, documents, pooling=LogSumExp(0.1))
    tensor([[2.0014]])
    """
    check_pooling("pooled_scores", pooling)
    if isinstance(pooling, Max) or pooling == TopK(1):
        return maxsim(
            queries, documents, candidates, queries_mask=queries_mask, documents_mask=documents_mask,
            zero_floor=zero_floor if isinstance(pooling, Max) else None,
        )  # fmt: skip
    if isinstance(documents, CompressedBatch):
        if documents_mask is not None:
            raise ValueError("pooled_scores: documents_mask goes with documents that are not compressed.")
        return _of_compressed(
            as_batch("pooled_scores", "queries", queries, queries_mask), documents, candidates, pooling
        )
    operands = prepared("pooled_scores", queries, documents, candidates, queries_mask, documents_mask, None)
    scores, _ = _scores_and_state(operands, numbers_of(pooling), recording("pooled_scores", operands))
    return scores


def _of_compressed(
    queries: TokenBatch, documents: CompressedBatch, candidates: Tensor | None, pooling: Pooling
) -> Tensor:
    """Scores of documents that are decompressed some at a time. Waits for the device."""
    check_candidates("pooled_scores", queries, documents, candidates, None)
    require_candidates("pooled_scores", candidates, len(documents))
    dtype, device = queries.values.dtype, documents.device
    at_once = max(1, DECOMPRESSED_NUMBERS // max(1, documents.max_length * documents.dim))
    if candidates is None:
        blocks = torch.arange(len(documents), device=device).split(at_once)
        vectors = (_decompressed(documents, block, dtype) for block in blocks)
        return torch.cat([pooled_scores(queries, each, pooling=pooling) for each in vectors], dim=1)
    scores = []
    for block in torch.arange(len(queries), device=device).split(max(1, at_once // max(1, candidates.shape[1]))):
        chosen, own = candidates[block].unique(return_inverse=True)
        vectors = _decompressed(documents, chosen, dtype)
        scores.append(pooled_scores(queries.select(block), vectors, own, pooling=pooling))
    return torch.cat(scores)


def _decompressed(documents: CompressedBatch, index: Tensor, dtype: torch.dtype) -> TokenBatch:
    """The live tokens of some documents, and no others."""
    documents = documents.select(index)
    live, tokens = live_tokens(documents.starts, documents.lengths, documents.keep), documents.tokens
    if isinstance(tokens, Fp8):
        # Float8 tensors cannot be indexed on every device.
        tokens = replace(tokens, values=tokens.values.view(torch.uint8)[live.row].view(torch.float8_e4m3fn))
    elif isinstance(tokens, Int8):
        scales = tokens.scales[live.row] if tokens.per_token else tokens.scales
        tokens = replace(tokens, values=tokens.values[live.row], scales=scales)
    else:
        scales = None if tokens.scales is None else tokens.scales[live.row]
        tokens = replace(tokens, codes=tokens.codes[live.row], packed=tokens.packed[live.row], scales=scales)
    return CompressedBatch(tokens, live.first, live.count, documents.max_length, gapless=True).decompress(dtype)


def state_bytes(pooling: Pooling, max_d_length: int, dtype: torch.dtype) -> int:
    """Bytes that are kept for the backward, for each query token and document with vectors of ``dtype``."""
    if isinstance(pooling, (Max, TopK)):
        return getattr(pooling, "k", 1) * winner_dtype(max_d_length).itemsize
    return (1 if isinstance(pooling, LogSumExp) else 2) * sum_dtype(dtype).itemsize


def numbers_of(pooling: Pooling) -> PoolingNumbers:
    """The pooling as arguments of the registered operators; not of ``Max()``."""
    if isinstance(pooling, TopK):
        return PoolingNumbers(pooling.k, 1.0, False)
    return PoolingNumbers(0, pooling.temperature, isinstance(pooling, LogSumExp))


def _path(values: Tensor, pooling: PoolingNumbers) -> ModuleType:
    """The module that pools such values."""
    module = path("pooled", blocked, values)
    if module is not blocked and pooling.k > module.LARGEST_K:
        _warn_of_large_k(pooling.k, module.LARGEST_K)
        return blocked
    return module


@functools.cache
def _warn_of_large_k(k: int, largest: int) -> None:
    logger.warning(
        "pooled_scores: TopK(%d) is computed in blocks of PyTorch, which wait for the GPU; the kernels take k up to %d.",
        k,
        largest,
    )


def live_counts(starts: Tensor, lengths: Tensor, keep: Tensor | None) -> Tensor:
    """Numbers of live tokens of each sequence, ``[N]``; the arguments are fields of a ``TokenBatch``."""
    if keep is None:
        return lengths
    before = torch.nn.functional.pad(keep.cumsum(0), (1, 0))
    return before[starts + lengths] - before[starts]


def gradient_of_each_winner(grad_scores: Tensor, operands: ScoringOperands, k: int) -> Tensor:
    """Gradients of scores ``[Nq, P]`` divided by how many winners a query token has in the document."""
    counts = live_counts(operands.d_starts, operands.d_lengths, operands.d_keep).clamp(1, k)
    return grad_scores / (counts if operands.candidates is None else counts[operands.candidates])


def _forward(operands: ScoringOperands, pooling: PoolingNumbers, want_state: bool) -> tuple[Tensor, Tensor | None]:
    return _path(operands.q_values, pooling).forward(operands, pooling, want_state)


def _backward(
    grad_scores: Tensor, state: Tensor, operands: ScoringOperands, pooling: PoolingNumbers, need_q: bool, need_d: bool
) -> tuple[Tensor, Tensor]:
    if pooling.k:
        grad_scores = gradient_of_each_winner(grad_scores, operands, pooling.k)
    return _path(operands.q_values, pooling).backward(grad_scores, state, operands, pooling, need_q, need_d)


def _forward_fake(operands, pooling, want_state):
    scores, _ = fake_scores(operands, False)
    if not want_state:
        return scores, None
    # Winners, or numbers for each query row and document.
    slots, rows = operands.num_slots, operands.q_values.shape[0]
    if pooling.k:
        return scores, scores.new_empty((slots, pooling.k, rows), dtype=winner_dtype(operands.max_d_length))
    return scores, scores.new_empty(1 if pooling.log_sum_exp else 2, slots, rows)


_scores_and_state = differentiable(
    Operator("pooled_forward", _forward, _forward_fake, check=functools.partial(check_numbers, "pooled_scores")),
    ("scores", "state"),
    ("q_values", "d_values"),
    Operator("pooled_backward", _backward, fake_gradients),
    where="pooled_scores",
)
