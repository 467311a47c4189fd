"""MaxSim in blocked PyTorch: the CPU path, and the path of every device or dtype without a kernel.

The forward lays out the live document tokens position by position (the first token of every document, then the second,
...), longest document first. One matrix product gives the similarities of many positions. Those of one position are a
contiguous slab, which three or four vectorised operations fold into the running maxima; no document is padded.
`torch.max` with indices would take longer than the matrix product, except where maxima are few. The backward is sparse:
each score passes its gradient to one document token per query token, so that both gradients are weighted sums of rows
(`embedding_bag`), in a fixed order.

Lengths and masks are read on the host, which waits for the device where that is not a CPU.
"""

from collections.abc import Callable, Iterator
from itertools import groupby
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pylate_fastmaxsim._dtypes import sum_dtype
from pylate_fastmaxsim._operands import CompressedOperands, ScoringOperands
from pylate_fastmaxsim._winners import no_winner, winner_dtype
from pylate_fastmaxsim.cpu.live_tokens import Live, live_tokens, rows_of, split_prefixes

# Similarities that the forward holds at once: 4 MiB of float32, which fit the caches.
BLOCK_ELEMENTS = 1 << 20

# Running maxima updated by one vectorised operation: many enough to hide the cost of a call, few enough for L2.
SLAB_ELEMENTS = 1 << 16

# With so few running maxima it is faster to take the maximum of many positions first.
FEW_ELEMENTS = 1 << 11

# Winners that the backward handles at once; each needs some 60 bytes of indices and weights.
WINNER_ELEMENTS = 1 << 17


def require_candidates(operator: str, candidates: Tensor | None, num_documents: int) -> None:
    """Raise ValueError where candidates on a CPU are out of range. Checking on a GPU would wait for it."""
    if candidates is None or not candidates.is_cpu or candidates.numel() == 0:
        return
    low, high = torch.aminmax(candidates)
    if low < 0 or high >= num_documents:
        raise ValueError(
            f"{operator}: candidates must be from 0 to Nd - 1 = {num_documents - 1}, got {int(low)} to {int(high)}."
        )


class Vectors(NamedTuple):
    """Reader of the vectors of document tokens."""

    read: Callable[[Tensor], Tensor]  # of rows [n]: [n, d], in the dtype of sums
    scales: Tensor | None = None  # [T] what similarities to each row are multiplied with


def _block_maxima(
    query_rows: Tensor,
    vectors: Vectors,
    live: Live,
    documents: Tensor,
    floor: Tensor,
    want_winners: bool,
    of_nan: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Maxima of blocks of query rows ``[B, R, d]``, each over its own documents ``[B, G]``, longest first.

    Returns maxima ``[B, G, R]`` and, in floating point, one more than the position of the winner (0: none). With
    ``of_nan`` a similarity counts as 1 where it is NaN and as 0 elsewhere.
    """
    batch, rows, dim = query_rows.shape
    dtype = query_rows.dtype
    count = live.count[documents]
    maxima = floor[documents][..., None].expand(*documents.shape, rows).to(dtype, copy=True)
    # Positions are floating point (exact up to 2^24), because only then every operation on a slab vectorises.
    winners = None
    if want_winners:
        # Without a floor of 0 the first live token wins until another is better, even at -infinity.
        first = live.position[live.first[documents].clamp(max=len(live.row) - 1)] + 1
        winners = maxima.isinf() * first[..., None].to(dtype)

    # Position by position, each with a prefix of the slots. A document that is shorter than the one of another block in
    # the same slot repeats its last token, which cannot win again.
    slot_count = count.amax(dim=0)
    prefixes = len(slot_count) - slot_count.bincount().cumsum(0)[:-1]
    runs = list(split_prefixes(prefixes.tolist(), max(1, BLOCK_ELEMENTS // (batch * max(rows, dim)))))

    transposed = query_rows.transpose(1, 2)
    changed = torch.empty_like(maxima)
    workspace = maxima.new_empty(batch * rows * max(map(sum, runs), default=0))
    first_rank = 0
    for sizes in runs:
        prefix = prefixes[first_rank : first_rank + len(sizes)]
        rank = torch.repeat_interleave(torch.arange(len(sizes), device=count.device), prefix)
        slot = torch.arange(len(rank), device=count.device) - (prefix.cumsum(0) - prefix)[rank]
        token = live.first[documents][:, slot] + torch.minimum(rank + first_rank, count[:, slot] - 1)
        token.clamp_(0, len(live.row) - 1)  # an empty document beside longer ones takes any token; see below
        first_rank += len(sizes)

        token_rows = live.row[token].view(-1)
        block_values = vectors.read(token_rows).view(*token.shape, dim)
        similarities = workspace[: token.numel() * rows].view(*token.shape, rows)
        torch.bmm(block_values, transposed, out=similarities)
        if vectors.scales is not None:
            similarities *= vectors.scales[token_rows].view(*token.shape, 1)
        if of_nan:
            torch.ne(similarities, similarities, out=similarities)
        # Positions that as many documents reach are one step where their maxima are few.
        steps = []
        for size, same in groupby(sizes):
            n = len(list(same))
            steps += [(size, n)] if size * batch * rows <= FEW_ELEMENTS else [(size, 1)] * n
        widths = [size * n for size, n in steps]
        slabs = similarities.split(widths, dim=1)
        numbers = (live.position[token] + 1).to(dtype)[..., None].split(widths, dim=1) if want_winners else slabs
        width = 0
        for slab, number, (size, n) in zip(slabs, numbers, steps, strict=True):
            if n > 1:
                slab = slab.unflatten(1, (n, size))
                if want_winners:
                    slab, first = slab.max(dim=1)
                    number = number.view(batch, n, size).transpose(1, 2).gather(2, first)
                else:
                    slab = slab.amax(dim=1)
            if size != width:
                width = size
                best, better = maxima[:, :width], changed[:, :width]
                winner = winners[:, :width] if want_winners else None
            if want_winners:
                torch.gt(slab, best, out=better)
                torch.maximum(winner, better.mul_(number), out=winner)
            torch.maximum(best, slab, out=best)
    empty = (count == 0)[..., None]
    if batch > 1 and bool(empty.any()):
        maxima.masked_fill_(empty, 0)
        if want_winners:
            winners.masked_fill_(empty, 0)
    if want_winners and bool(maxima.isnan().any()):
        # No comparison finds NaN. It wins, so that the gradient of a NaN score reaches the encoder and is noticed. This is
        # rare, so the products may run again.
        is_nan, first_nan = _block_maxima(query_rows, vectors, live, documents, floor, True, of_nan=True)
        winners = torch.where(is_nan > 0, first_nan, winners)
    return maxima, winners


def _query_blocks(queries: Live, documents: Live, candidates: Tensor | None) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Split the work into batches of blocks of queries that share their documents.

    Yields the queries ``[B, n]``, and for each block the documents ``[B, P]`` and their columns in the scores
    ``[B, P]``, longest document first. All pairs: one block of many queries. Candidates: B blocks of one query, whose
    lengths lie between two powers of two and whose longest documents are similar, because the blocks of a batch advance
    together.
    """
    if candidates is None:
        order = queries.count.argsort(stable=True)
        order = order[queries.count[order] > 0]
        blocks = (queries.count[order].cumsum(0) - 1) // SLAB_ELEMENTS
        by_length = documents.count.argsort(descending=True, stable=True)[None]
        for block in order.split(blocks.unique_consecutive(return_counts=True)[1].tolist()):
            yield block[None], by_length, by_length
        return
    candidate_count = documents.count[candidates]
    order = candidate_count.amax(dim=1).argsort(stable=True)
    power = torch.frexp((queries.count - 1).double()).exponent  # the same for counts from 2^p + 1 to 2^(p + 1)
    order = order[queries.count[order] > 0]
    order = order[power[order].argsort(stable=True)]
    sizes = power[order].unique_consecutive(return_counts=True)[1]
    for similar in order.split(sizes.tolist()):
        length = int(queries.count[similar].max())
        for block in similar.split(max(1, SLAB_ELEMENTS // (length * candidates.shape[1]))):
            slots = candidate_count[block].argsort(dim=1, descending=True, stable=True)
            yield block[:, None], candidates[block].gather(1, slots), slots


def forward(operands: ScoringOperands, want_winners: bool) -> tuple[Tensor, Tensor | None]:
    """Scores ``[Nq, P]`` and winners ``[P, Tq]`` (``None`` if not wanted); see :mod:`pylate_fastmaxsim.ops.maxsim`."""
    q_values, d_values = operands.q_values, operands.d_values
    dtype = sum_dtype(q_values.dtype)
    vectors = Vectors(lambda rows: d_values.index_select(0, rows).to(dtype))
    return scored(operands, q_values, vectors, dtype, want_winners, zero_floor=operands.zero_floor)


def scored(
    operands: ScoringOperands | CompressedOperands,
    q_values: Tensor,
    vectors: Vectors,
    dtype: torch.dtype,
    want_winners: bool,
    zero_floor: Tensor | None = None,
    q_scales: Tensor | None = None,
    d_scales: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Scores and winners of queries ``q_values`` and documents that are read as ``vectors`` says.

    Maxima are multiplied with the scales of their query token ``[Tq]`` and of their document ``[Nd]``.
    """
    # Here rather than in the operator, so that a graph checks as well.
    candidates = operands.candidates
    require_candidates("maxsim", candidates, len(operands.d_starts))
    columns = operands.num_slots
    scores = q_values.new_zeros((len(operands.q_starts), columns), dtype=dtype)
    index_dtype = winner_dtype(operands.max_d_length)
    winners = None
    if want_winners:
        winners = torch.full(
            (columns, len(q_values)), no_winner(index_dtype), dtype=index_dtype, device=q_values.device
        )
    queries = live_tokens(operands.q_starts, operands.q_lengths, operands.q_keep)
    documents = live_tokens(operands.d_starts, operands.d_lengths, operands.d_keep)
    if scores.numel() == 0 or len(queries.row) == 0 or len(documents.row) == 0:
        return scores, winners
    empty = floor_is_zero = documents.count == 0
    if zero_floor is not None:
        floor_is_zero = empty | zero_floor
    floor = torch.where(floor_is_zero, 0.0, -torch.inf)

    for block, block_documents, slots in _query_blocks(queries, documents, candidates):
        count = queries.count[block]
        if candidates is None:
            rows = rows_of(queries, block[0])[None, None]
            lengths, sizes = count[0].unique_consecutive(return_counts=True)
            runs = list(zip(lengths.tolist(), sizes.tolist(), strict=True))
        else:
            # A query that is shorter than another of its batch repeats its last row, which its sum leaves out.
            rank = torch.arange(int(count.max()), device=count.device)
            rows = queries.row[queries.first[block] + torch.minimum(rank, count - 1)][:, None]
            repeated = (rank >= count)[:, None]
        query_rows = q_values[rows[:, 0]].to(dtype)
        group = max(1, SLAB_ELEMENTS // rows.numel())
        for group_documents, group_slots in zip(block_documents.split(group, 1), slots.split(group, 1), strict=True):
            maxima, winner = _block_maxima(query_rows, vectors, documents, group_documents, floor, want_winners)
            if d_scales is not None:
                maxima *= d_scales[group_documents][..., None]
            if q_scales is not None:
                maxima *= q_scales[rows]
                maxima.masked_fill_(empty[group_documents][..., None], 0)  # also of a query token with NaN
            if want_winners:
                winners[group_slots[..., None], rows] = winner.to(index_dtype).sub_(1)
            if candidates is None:
                # Queries of one length stand together: one sum for all of them.
                parts = maxima.split([length * size for length, size in runs], dim=-1)
                sums = [
                    part.unflatten(-1, (size, length)).sum(-1) for part, (length, size) in zip(parts, runs, strict=True)
                ]
                scores[block[:, None], group_slots[..., None]] = torch.cat(sums, dim=-1)
            else:
                scores[block, group_slots] = maxima.masked_fill_(repeated, 0).sum(-1)
    return scores, winners


def weighted_sums(table: Tensor, rows: Tensor, weights: Tensor, sizes: Tensor) -> Tensor:
    """Weighted sums of consecutive runs of ``table[rows]``, one for each of ``sizes``."""
    return F.embedding_bag(rows, table, sizes.cumsum(0) - sizes, mode="sum", per_sample_weights=weights)


def winning_tokens(
    grad_scores: Tensor,
    winners: Tensor,
    operands: ScoringOperands | CompressedOperands,
    dtype: torch.dtype,
    at_once: int = WINNER_ELEMENTS,
    d_scales: Tensor | None = None,
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor, Tensor]]:
    """The document tokens that give query rows their gradients, ``at_once`` of them at a time.

    Yields a block of query rows ``[B]``, and of each won token, row after row: its row in the documents, the query row
    and the weight. Last, how many tokens each row of the block has ``[B]``. Weights are multiplied with ``d_scales``
    ``[Nd]``.
    """
    d_starts, candidates = operands.d_starts, operands.candidates
    live = live_tokens(operands.q_starts, operands.q_lengths, operands.q_keep)
    if winners.numel() == 0 or grad_scores.numel() == 0 or len(live.row) == 0:
        return
    none = no_winner(winners.dtype)
    row_block = min(len(live.row), at_once)
    column_block = max(1, at_once // row_block)
    # Live rows only: few queries of a large batch may have been selected.
    for block, query in zip(live.row.split(row_block), live.sequence.split(row_block), strict=True):
        for first_column in range(0, len(winners), column_block):
            group = slice(first_column, first_column + column_block)
            winner = winners[group, block].t()
            weight = grad_scores[:, group].to(dtype)[query]
            document = group if candidates is None else candidates[:, group][query]
            if d_scales is not None:
                weight = weight * d_scales[document]
            token = winner + d_starts[document]
            row = block[:, None].expand(token.shape)
            # A pair of weight 0, as the softmax of a loss leaves many, gathers nothing, not even NaN.
            wins = (winner != none) & (weight != 0)
            bag_sizes = wins.sum(dim=1)
            if bool(wins.all()):
                token, row, weight = token.reshape(-1), row.reshape(-1), weight.reshape(-1)
            else:
                token, row, weight = token[wins], row[wins], weight[wins]
            yield block, token, row, weight, bag_sizes


def backward(
    grad_scores: Tensor, winners: Tensor, operands: ScoringOperands, need_q: bool, need_d: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of ``q_values`` and ``d_values`` (empty if not needed) from the winners of :func:`forward`."""
    q_values, d_values = operands.q_values, operands.d_values
    dtype = sum_dtype(q_values.dtype)
    grad_q = q_values.new_zeros(q_values.shape if need_q else 0, dtype=dtype)
    grad_d = d_values.new_zeros(d_values.shape if need_d else 0, dtype=dtype)
    q_table = q_values.to(dtype)
    d_table = d_values.to(dtype) if need_q else None  # else only the shape of the documents counts
    for block, token, row, weight, bag_sizes in winning_tokens(grad_scores, winners, operands, dtype):
        if need_q:
            grad_q[block] += weighted_sums(d_table, token, weight, bag_sizes)
        if need_d:
            token, order = token.sort(stable=True)
            token, bag_sizes = token.unique_consecutive(return_counts=True)
            grad_d[token] += weighted_sums(q_table, row[order], weight[order], bag_sizes)
    return grad_q.to(q_values.dtype), grad_d.to(d_values.dtype)
