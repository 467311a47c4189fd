"""Top-k, softmax and log-sum-exp pooling in blocked PyTorch: the CPU path, and that of every case without a kernel.

Similarities are held for a block of query rows and documents at a time, padded to the longest of these. Top-k keeps
winners and has MaxSim's sparse backward. The smooth poolings keep a number or two for each query row and document and
compute the similarities again in the backward.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from pylate_fastmaxsim._dtypes import sum_dtype
from pylate_fastmaxsim._operands import PoolingNumbers, ScoringOperands
from pylate_fastmaxsim._winners import no_winner, winner_dtype
from pylate_fastmaxsim.cpu import maxsim
from pylate_fastmaxsim.cpu.live_tokens import Live, live_tokens
from pylate_fastmaxsim.cpu.maxsim import BLOCK_ELEMENTS, require_candidates


class _Block(NamedTuple):
    """R query rows and G documents, padded to L tokens."""

    rows: Tensor  # [R] rows of the queries' values
    query: Tensor  # [R] the query of each
    slots: Tensor  # [G] columns of the scores
    tokens: Tensor  # [G, L] rows of the documents' values; a shorter document repeats its last one
    position: Tensor  # [G, L] counted from the start of the document
    live: Tensor  # [G, L] which of them are no repetition


def _blocks(operands: ScoringOperands) -> Iterator[_Block]:
    """The work in blocks of at most ``BLOCK_ELEMENTS`` similarities, or of one row and document. Leaves out empty ones."""
    candidates = operands.candidates
    queries = live_tokens(operands.q_starts, operands.q_lengths, operands.q_keep)
    documents = live_tokens(operands.d_starts, operands.d_lengths, operands.d_keep)
    if candidates is None:
        by_length = documents.count.argsort(descending=True, stable=True)
        by_length = by_length[documents.count[by_length] > 0]
        for rows in torch.arange(len(queries.row), device=queries.row.device).split(1024):
            yield from _cut(queries, rows, documents, by_length, by_length)
        return
    firsts = queries.first.tolist()
    for query, count in enumerate(queries.count.tolist()):
        own = candidates[query]
        slots = documents.count[own].argsort(descending=True, stable=True)
        slots = slots[documents.count[own[slots]] > 0]
        rows = torch.arange(firsts[query], firsts[query] + count, device=slots.device)
        yield from _cut(queries, rows, documents, own[slots], slots)


def _cut(queries: Live, rows: Tensor, documents: Live, chosen: Tensor, slots: Tensor) -> Iterator[_Block]:
    begin = 0
    while len(rows) and begin < len(chosen):
        longest = int(documents.count[chosen[begin]])
        end = begin + max(1, BLOCK_ELEMENTS // (longest * len(rows)))
        some = chosen[begin:end]
        rank = torch.arange(longest, device=rows.device)
        live = rank < documents.count[some][:, None]
        token = documents.first[some][:, None] + torch.minimum(rank, documents.count[some][:, None] - 1)
        yield _Block(
            queries.row[rows], queries.sequence[rows], slots[begin:end], documents.row[token],
            documents.position[token], live,
        )  # fmt: skip
        begin = end


def _vectors(operands: ScoringOperands, block: _Block) -> tuple[Tensor, Tensor]:
    dtype = sum_dtype(operands.q_values.dtype)
    return operands.q_values[block.rows].to(dtype), operands.d_values[block.tokens].to(dtype)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """``torch.bmm``. Autocast, which has done its part, leaves products with an `out` alone."""
    return torch.bmm(a, b, out=a.new_empty(a.shape[0], a.shape[1], b.shape[2]))


def _similarities(query_rows: Tensor, tokens: Tensor) -> Tensor:
    """``[G, R, L]``."""
    return _product(query_rows.expand(len(tokens), -1, -1), tokens.transpose(1, 2))


def _add_rows(total: Tensor, rows: Tensor, values: Tensor) -> None:
    """total[rows] += values, in a fixed order also where rows repeat."""
    if total.is_cpu:
        total.index_add_(0, rows, values)
    else:
        total.index_put_((rows,), values, accumulate=True)


def forward(operands: ScoringOperands, pooling: PoolingNumbers, want_state: bool) -> tuple[Tensor, Tensor | None]:
    """Scores ``[Nq, P]`` and what the backward needs; see :mod:`pylate_fastmaxsim.ops.pooled`.

    That is winners ``[P, k, Tq]``, or ``[1 or 2, P, Tq]`` of the smooth poolings: the log of the sum of exponentials,
    and for softmax the pooled similarity.
    """
    q_values = operands.q_values
    require_candidates("pooled_scores", operands.candidates, len(operands.d_starts))
    dtype, columns, num_rows = sum_dtype(q_values.dtype), operands.num_slots, len(q_values)
    scores = q_values.new_zeros((len(operands.q_starts), columns), dtype=dtype)
    state = None
    if want_state and pooling.k:
        index_dtype = winner_dtype(operands.max_d_length)
        state = q_values.new_full((columns, pooling.k, num_rows), no_winner(index_dtype), dtype=index_dtype)
    elif want_state:
        state = q_values.new_zeros((1 if pooling.log_sum_exp else 2, columns, num_rows), dtype=dtype)
    for block in _blocks(operands):
        query_rows, tokens = _vectors(operands, block)
        similarities = _similarities(query_rows, tokens)
        live = block.live[:, None]
        if pooling.k:
            pooled, position = _k_largest(similarities.masked_fill_(~live, -torch.inf), block, pooling.k, want_state)
            if want_state:
                ranks = torch.arange(position.shape[-1], device=position.device)
                state[block.slots[:, None, None], ranks[:, None], block.rows] = position.transpose(1, 2).to(state.dtype)
        else:
            log_sum = (similarities / pooling.temperature).masked_fill_(~live, -torch.inf).logsumexp(dim=-1)
            pooled = log_sum * pooling.temperature
            if not pooling.log_sum_exp:
                weights = (similarities / pooling.temperature).sub_(log_sum[..., None]).exp_()
                pooled = weights.mul_(similarities).masked_fill_(~live, 0).sum(dim=-1)
            if want_state:
                state[0, block.slots[:, None], block.rows] = log_sum
                if not pooling.log_sum_exp:
                    state[1, block.slots[:, None], block.rows] = pooled
        part = scores.new_zeros(len(scores), len(block.slots))
        _add_rows(part, block.query, pooled.t())
        scores[:, block.slots] += part
    return scores, state


def _k_largest(similarities: Tensor, block: _Block, k: int, want_winners: bool) -> tuple[Tensor, Tensor | None]:
    """Means of the k largest ``[G, R]``, and positions of their tokens in the document, -1 where there are fewer."""
    length = similarities.shape[-1]
    values, column = similarities.topk(min(k, length), dim=-1)
    counted = (torch.arange(values.shape[-1], device=values.device) < block.live.sum(dim=1)[:, None])[:, None]
    means = values.masked_fill(~counted, 0).sum(dim=-1) / counted.sum(dim=-1)
    if not want_winners:
        return means, None
    # topk takes any of those that equal the k-th, and a masked one for a live one at -inf.
    settled = (similarities >= values[..., -1:]).sum(dim=-1) == values.shape[-1]
    if not bool(settled.all()):
        column = similarities.sort(dim=-1, descending=True, stable=True).indices[..., : values.shape[-1]]
    position = block.position[:, None].expand(-1, column.shape[1], -1).gather(2, column)
    return means, position.masked_fill_(~counted, -1)


def backward(
    gradient: Tensor, state: Tensor, operands: ScoringOperands, pooling: PoolingNumbers, need_q: bool, need_d: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of ``q_values`` and ``d_values`` (empty if not needed) from those of the scores and the forward's state.

    For top-k the gradient of a score comes divided by the number of its document's winners.
    """
    if pooling.k:
        return _of_winners(gradient, state, operands, need_q, need_d)
    q_values, d_values = operands.q_values, operands.d_values
    dtype = sum_dtype(q_values.dtype)
    grad_q = q_values.new_zeros(q_values.shape if need_q else 0, dtype=dtype)
    grad_d = d_values.new_zeros(d_values.shape if need_d else 0, dtype=dtype)
    gradient = gradient.to(dtype)
    for block in _blocks(operands):
        query_rows, tokens = _vectors(operands, block)
        similarities = _similarities(query_rows, tokens)
        where = block.slots[:, None], block.rows
        weights = (similarities / pooling.temperature).sub_(state[0][where][..., None]).exp_()
        if not pooling.log_sum_exp:
            weights *= similarities.sub_(state[1][where][..., None]).div_(pooling.temperature).add_(1)
        weights *= gradient[block.query[None], block.slots[:, None]][..., None]
        weights.masked_fill_(~block.live[:, None], 0)
        if need_q:
            grad_q[block.rows] += _product(weights, tokens).sum(dim=0)
        if need_d:
            parts = _product(weights.transpose(1, 2), query_rows.expand(len(weights), -1, -1))
            _add_rows(grad_d, block.tokens[block.live], parts[block.live])
    return grad_q.to(q_values.dtype), grad_d.to(d_values.dtype)


def _of_winners(gradient, winners, operands, need_q, need_d) -> tuple[Tensor, Tensor]:
    """MaxSim's backward with a column for each rank: those of a document name it once more as a candidate."""
    columns, k, num_rows = winners.shape
    candidates = operands.candidates
    if candidates is None:
        candidates = torch.arange(columns, device=winners.device).expand(len(gradient), -1)
    return maxsim.backward(
        gradient.repeat_interleave(k, dim=1),
        winners.view(columns * k, num_rows),
        operands._replace(candidates=candidates.repeat_interleave(k, dim=1)),
        need_q, need_d,
    )  # fmt: skip
