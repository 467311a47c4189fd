"""Scores against the documents of all ranks, passed round in a ring, so that no rank holds them all.

Each rank starts with its own shard of documents. It scores its queries against the shard at hand while the next one
arrives from the previous rank, and passes it on. The backward goes round once more and sends the gradient of each shard
along: every rank adds its part, always in the same order, and the last rank returns the sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from pylate_fastmaxsim._checks import require_tensor
from pylate_fastmaxsim._dtypes import sum_dtype
from pylate_fastmaxsim._operands import ScoringOperands
from pylate_fastmaxsim._winners import queries_at_once
from pylate_fastmaxsim.ops import grad_filter as grad_filters
from pylate_fastmaxsim.ops.distributed.layout import describe, rank_and_ranks
from pylate_fastmaxsim.ops.grad_filter import GradFilter
from pylate_fastmaxsim.ops.operands import as_batch, prepared, recording
from pylate_fastmaxsim.ops.pooled import Max, Pooling, check_pooling, is_maximum, numbers_of, state_bytes
from pylate_fastmaxsim.tokens import TokenBatch

# State of all shards that is kept for the backward: winners, or what other poolings keep. That of further shards is
# recomputed there, so that memory does not grow with the number of ranks.
KEPT_STATE_BYTES = 2**30


def ring_maxsim(
    queries: Tensor,
    documents: TokenBatch,
    *,
    queries_mask: Tensor | None = None,
    zero_floor: Tensor | None = None,
    grad_filter: GradFilter = None,
    pooling: Pooling = Max(),
) -> Tensor:
    """Score this rank's queries against the documents of all ranks, holding two ranks' documents at a time.

    All ranks of the default process group must call it together, and its backward as well. Scores and gradients are
    those of :func:`~pylate_fastmaxsim.pooled_scores` on the gathered documents: the gradient of a document is the sum over the
    queries of all ranks, in float32 (float64 for float64 vectors) and in a fixed order. Waits for the device once, for
    the number of tokens of each rank. Without a process group there is one rank.

    Parameters
    ----------
    queries
        Padded token vectors, ``[Nq, Lq, d]``. Nq and Lq may differ between ranks.
    documents
        The Nd documents of this rank, of the same d, dtype and device. Nd is the same on all ranks, their tokens are
        not.
    queries_mask
        Query tokens that count, ``[Nq, Lq]``, bool or 0/1. ``None``: all.
    zero_floor
        As in :func:`~pylate_fastmaxsim.maxsim`, ``[Nd]``, bool; on all ranks or on none, and with the maximum only.
    grad_filter
        As in :func:`~pylate_fastmaxsim.maxsim`; it sees the gradients of all documents of a query.
    pooling
        As in :func:`~pylate_fastmaxsim.pooled_scores`.

    Returns
    -------
    Tensor
        Scores ``[Nq, ranks * Nd]``, those of rank 0's documents first; float32, or float64 for float64 vectors.

    Raises
    ------
    ValueError
        Shapes, dtypes or devices do not fit together, the ranks differ in the number of documents, in d, in dtype or in
        whether there is a ``zero_floor``, or some ranks gather instead. Or a ``zero_floor`` comes with another pooling
        than the maximum.
    TypeError
        An argument is of the wrong type.
    NotImplementedError
        Second derivatives are asked for, or the call is inside of torch.vmap, torch.func or forward-mode derivatives.

    Examples
    --------
    >>> import torch
    >>> from pylate_fastmaxsim import TokenBatch
    >>> queries = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
    >>> documents = TokenBatch.from_list([torch.tensor([[0.5, 0.0], [2.0, -1.0]]), torch.ones(1, 2)])
    >>> ring_maxsim(queries, documents)
    tensor([[2., 2.]])
    """
    grad_filters.check(grad_filter, "ring_maxsim")
    check_pooling("ring_maxsim", pooling)
    if zero_floor is not None and not is_maximum(pooling):
        raise ValueError(f"ring_maxsim: zero_floor goes with the maximum only, got pooling={pooling}.")
    require_tensor("ring_maxsim", "queries", queries, "[Nq, Lq, d]")
    documents = as_batch("ring_maxsim", "documents", documents, None)
    operands = prepared("ring_maxsim", queries, documents, None, queries_mask, None, zero_floor)
    differentiate = recording("ring_maxsim", operands)
    # Described as they are sent: autocast may be on in one rank alone.
    shards = _shards(documents.with_values(operands.d_values), zero_floor)
    most = max(shard.state_bytes(pooling, operands.q_values.dtype) for shard in shards)
    chunks = _chunks(operands, queries_at_once(queries.shape[1], len(documents), most))
    scores = _Ring.apply(operands.q_values, operands.d_values, chunks, shards, pooling, differentiate)
    return grad_filters.filtered(scores) if differentiate and grad_filter else scores


@dataclass(frozen=True)
class _Shard:
    """The documents of one rank without their vectors."""

    rows: int
    starts: Tensor
    lengths: Tensor
    max_length: int
    keep: Tensor
    zero_floor: Tensor | None

    def state_bytes(self, pooling: Pooling, dtype: torch.dtype) -> int:
        """What is kept for each query token and document."""
        return state_bytes(pooling, self.max_length, dtype)


@dataclass(frozen=True)
class _Chunk:
    """Some of the queries without their vectors."""

    queries: slice
    rows: slice
    starts: Tensor
    lengths: Tensor
    max_length: int
    keep: Tensor | None


def _shards(documents: TokenBatch, zero_floor: Tensor | None) -> list[_Shard]:
    """The documents of every rank."""
    shards = describe(documents, zero_floor, in_ring=True)
    floors = [None] * len(shards.rows) if shards.zero_floor is None else shards.zero_floor
    return [
        _Shard(rows, starts, lengths, max_length, keep[:rows], floor)
        for rows, starts, lengths, max_length, keep, floor in zip(
            shards.rows, shards.starts, shards.lengths, shards.max_lengths, shards.keep, floors, strict=True
        )
    ]


def _chunks(operands: ScoringOperands, size: int) -> list[_Chunk]:
    """Padded queries in parts of ``size``."""
    chunks, length = [], operands.max_q_length
    for begin in range(0, len(operands.q_starts), size):
        end = min(begin + size, len(operands.q_starts))
        rows = slice(begin * length, end * length)
        keep = None if operands.q_keep is None else operands.q_keep[rows]
        starts = operands.q_starts[: end - begin]
        chunks.append(_Chunk(slice(begin, end), rows, starts, operands.q_lengths[begin:end], length, keep))
    return chunks


def _pass_on(outgoing: Tensor, incoming: Tensor, tag: int) -> list[dist.Work]:
    """Begin to send one tensor to the next rank and to receive the other from the rank before."""
    rank, ranks = rank_and_ranks()
    ends = [(dist.isend, outgoing, (rank + 1) % ranks), (dist.irecv, incoming, (rank - 1) % ranks)]
    # A shard without tokens is not sent; both sides know its size.
    operations = [dist.P2POp(end, tensor, peer, tag=tag) for end, tensor, peer in ends if tensor.numel()]
    return dist.batch_isend_irecv(operations) if operations else []


def _finish(works: list[dist.Work]) -> None:
    for work in works:
        work.wait()


def _go_round(own: Tensor, shards: list[_Shard]) -> Iterator[tuple[int, Tensor]]:
    """Each rank and the vectors of its documents, this rank first. The next ones arrive while these are scored."""
    rank, ranks = rank_and_ranks()
    at_hand = own.contiguous()
    for step in range(ranks):
        owner = (rank - step) % ranks
        if step + 1 == ranks:
            yield owner, at_hand
            return
        incoming = own.new_empty((shards[owner - 1].rows, own.shape[1]))
        works = _pass_on(at_hand, incoming, tag=0)
        yield owner, at_hand
        _finish(works)
        at_hand = incoming


class _Ring(torch.autograd.Function):
    """Scores ``[Nq, ranks * Nd]`` of this rank's queries; every rank has to differentiate with the others."""

    @staticmethod
    def forward(ctx, q_values, d_values, chunks, shards, pooling, differentiate):
        count = len(shards[0].starts)
        num_queries = sum(len(chunk.starts) for chunk in chunks)
        scores = q_values.new_empty((num_queries, len(shards) * count), dtype=sum_dtype(q_values.dtype))
        ctx.kept, kept, left = {}, [], KEPT_STATE_BYTES
        for owner, values in _go_round(d_values, shards):
            size = count * len(q_values) * shards[owner].state_bytes(pooling, q_values.dtype)
            keeps = differentiate and size <= left
            if keeps:
                ctx.kept[owner] = len(kept)
                left -= size
            for chunk in chunks:
                part, state = _forward(_operands(q_values, chunk, values, shards[owner]), pooling, keeps)
                scores[chunk.queries, owner * count : (owner + 1) * count] = part
                if keeps:
                    kept.append(state)
            del values  # as the generator does, before the shard after the next one is allocated
        ctx.save_for_backward(q_values, d_values, *kept)
        ctx.chunks, ctx.shards, ctx.pooling = chunks, shards, pooling
        return scores

    @staticmethod
    def backward(ctx, grad_scores):
        # With gradients enabled second ones are asked for. `once_differentiable` would take a gradient without a graph for
        # a constant.
        if torch.is_grad_enabled():
            raise NotImplementedError(
                "ring_maxsim: second derivatives are not supported; its backward cannot be differentiated."
            )
        q_values, d_values, *kept = ctx.saved_tensors
        need_q, need_d, *_ = ctx.needs_input_grad
        _, ranks = rank_and_ranks()
        exact = sum_dtype(q_values.dtype)
        grad_q = torch.zeros_like(q_values, dtype=exact) if need_q else None
        grad_d = None
        for owner, values in _go_round(d_values, ctx.shards):
            shard = ctx.shards[owner]
            outgoing, works = grad_d, []
            if outgoing is not None:
                # Receive the previous ranks' gradient of this shard, and send that of the shard before.
                grad_d = values.new_empty(values.shape, dtype=exact)
                works = _pass_on(outgoing, grad_d, tag=1)
            count = len(shard.starts)
            part = grad_scores[:, owner * count : (owner + 1) * count]
            states = [None] * len(ctx.chunks)
            if owner in ctx.kept:
                states = kept[ctx.kept[owner] :][: len(ctx.chunks)]
            added = _gradients_of_shard(part, states, q_values, ctx.chunks, values, shard, ctx.pooling, grad_q, need_d)
            _finish(works)
            if need_d:
                grad_d = added.to(exact) if grad_d is None else grad_d.add_(added)
            del values, outgoing, added
        if need_d and ranks > 1:
            outgoing, grad_d = grad_d, torch.empty_like(d_values, dtype=exact, memory_format=torch.contiguous_format)
            _finish(_pass_on(outgoing, grad_d, tag=1))
        return (
            grad_q.to(q_values.dtype) if need_q else None,
            grad_d.to(d_values.dtype) if need_d else None,
            None,
            None,
            None,
            None,
        )


def _gradients_of_shard(
    grad_scores: Tensor,
    states: list[Tensor | None],
    q_values: Tensor,
    chunks: list[_Chunk],
    d_values: Tensor,
    shard: _Shard,
    pooling: Pooling,
    grad_q: Tensor | None,
    need_d: bool,
) -> Tensor | None:
    """This rank's part of the gradient of a shard. The gradient of the queries is added to ``grad_q``."""
    grad_d = None
    for chunk, kept in zip(chunks, states, strict=True):
        operands = _operands(q_values, chunk, d_values, shard)
        if kept is None:
            _, kept = _forward(operands, pooling, want_state=True)
        needed = grad_q is not None, need_d
        of_queries, of_documents = _backward(grad_scores[chunk.queries].contiguous(), kept, operands, pooling, *needed)
        if grad_q is not None:
            grad_q[chunk.rows] += of_queries
        if need_d:
            grad_d = of_documents if grad_d is None else grad_d.to(sum_dtype(d_values.dtype)).add_(of_documents)
    if need_d and grad_d is None:
        return torch.zeros_like(d_values)
    return grad_d


def _operands(q_values: Tensor, chunk: _Chunk, d_values: Tensor, shard: _Shard) -> ScoringOperands:
    """A chunk of queries against a shard of documents."""
    return ScoringOperands(
        q_values[chunk.rows], chunk.starts, chunk.lengths, chunk.keep,
        d_values, shard.starts, shard.lengths, shard.keep,
        None, shard.zero_floor, chunk.max_length, shard.max_length, False, False,
    )  # fmt: skip


def _forward(operands: ScoringOperands, pooling: Pooling, want_state: bool) -> tuple[Tensor, Tensor]:
    if is_maximum(pooling):
        return torch.ops.pylate_fastmaxsim.maxsim_forward(*operands, want_state)
    return torch.ops.pylate_fastmaxsim.pooled_forward(*operands, *numbers_of(pooling), want_state)


def _backward(
    grad_scores: Tensor, state: Tensor, operands: ScoringOperands, pooling: Pooling, need_q: bool, need_d: bool
) -> tuple[Tensor, Tensor]:
    if is_maximum(pooling):
        return torch.ops.pylate_fastmaxsim.maxsim_backward(grad_scores, state, *operands, need_q, need_d)
    numbers = numbers_of(pooling)
    return torch.ops.pylate_fastmaxsim.pooled_backward(grad_scores, state, *operands, *numbers, need_q, need_d)
