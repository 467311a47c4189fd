"""XTR scores in blocked PyTorch: the CPU path, and the path of every device or dtype without a kernel.

For a block of queries the similarities to a block of documents are computed once. They update the k largest of each
query token and its maximum for each document. Which of these maxima pass is known after the last block. The backward is
MaxSim's, from the winners that pass.
"""

import torch
from torch import Tensor

from pylate_fastmaxsim._dtypes import sum_dtype
from pylate_fastmaxsim._operands import ScoringOperands
from pylate_fastmaxsim._winners import no_winner, winner_dtype
from pylate_fastmaxsim.cpu.live_tokens import Live, live_tokens, rows_of, split_prefixes
from pylate_fastmaxsim.cpu.maxsim import BLOCK_ELEMENTS, require_candidates

# Tokens of a block of documents, at least a multiple of k, since every block is merged with the k largest so far.
BLOCK_TOKENS = 4096
BLOCK_TOKENS_OF_K = 4


class _Maxima:
    """For some query rows the k-th largest similarity, and for every document the largest, its token, and the least."""

    def __init__(self, query_rows: Tensor, d_values: Tensor, documents: Live, k: int) -> None:
        shape = len(query_rows), len(documents.count)
        self.best = query_rows.new_zeros(shape)
        self.worst = query_rows.new_zeros(shape)
        self.position = torch.zeros(shape, dtype=torch.int64, device=query_rows.device)
        largest = query_rows.new_empty(len(query_rows), 0)
        order = documents.count.argsort(descending=True, stable=True)
        order = order[documents.count[order] > 0]
        blocks = split_prefixes(documents.count[order].tolist(), max(BLOCK_TOKENS, BLOCK_TOKENS_OF_K * k))
        for block in order.split([len(counts) for counts in blocks]):
            tokens = d_values[rows_of(documents, block)].to(query_rows.dtype)
            # Autocast, which has done its part, leaves products with an `out` alone.
            similarities = torch.mm(query_rows, tokens.t(), out=query_rows.new_empty(len(query_rows), len(tokens)))
            largest = torch.cat([largest, similarities], dim=1)
            if largest.shape[1] > k:
                largest = largest.topk(k, dim=1, sorted=False).values
            self._fold(similarities, documents, block)
        # With fewer than k tokens all pass.
        self.threshold = largest.new_full((len(largest), 1), -torch.inf)
        if largest.shape[1] == k:
            # As in topk, NaN is larger than any number.
            self.threshold = torch.where(largest.isnan(), torch.inf, largest).amin(dim=1, keepdim=True)
            self.threshold.masked_fill_(largest.isnan().all(dim=1, keepdim=True), torch.nan)

    def _fold(self, similarities: Tensor, documents: Live, block: Tensor) -> None:
        """Fold in a block of documents, longest first, from their similarities one after the other."""
        begin = 0
        while begin < len(block):
            # As many documents as, padded to the longest, take no more memory than the similarities.
            longest = int(documents.count[block[begin]])
            some = block[begin : begin + max(1, similarities.shape[1] // longest)]
            count = documents.count[some]
            # Past its end a document repeats its last token, which changes neither extreme and never comes first.
            rank = torch.arange(longest, device=count.device)
            column = (count.cumsum(0) - count)[:, None] + torch.minimum(rank, count[:, None] - 1)
            padded = similarities.index_select(1, column.reshape(-1)).view(len(similarities), *column.shape)
            best, place = padded.max(dim=2)
            self.best[:, some] = best
            self.worst[:, some] = padded.amin(dim=2)
            self.position[:, some] = documents.position[documents.first[some] + place]
            similarities = similarities[:, int(count.sum()) :]
            begin += len(some)

    def passing(self, zero_floor: Tensor | None, empty: Tensor, zeros_compete: bool) -> Tensor:
        """Which maxima pass, ``[R, Nd]``; with ``zeros_compete`` not those that a competing 0 reaches or exceeds."""
        passes = ((self.best >= self.threshold) | self.best.isnan()) & ~empty
        if zeros_compete:
            # The maximum of a document passes if any of its tokens does, and all do if the least one passes.
            floor = self.worst < self.threshold
            if zero_floor is not None:
                floor |= zero_floor
            passes &= ~(floor & (self.best <= 0))
        return passes


def forward(
    operands: ScoringOperands, k: int, count_retrieved: bool, want_winners: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Sums, counts ``[Nq, P]`` and winners ``[P, Tq]`` (``None`` unless wanted); see :mod:`pylate_fastmaxsim.ops.xtr`."""
    q_values, d_values, candidates = operands.q_values, operands.d_values, operands.candidates
    require_candidates("xtr_scores", candidates, len(operands.d_starts))
    dtype, columns = sum_dtype(q_values.dtype), operands.num_slots
    sums = q_values.new_zeros((len(operands.q_starts), columns), dtype=dtype)
    counts = torch.zeros_like(sums)
    index_dtype = winner_dtype(operands.max_d_length)
    none, winners = no_winner(index_dtype), None
    if want_winners:
        winners = torch.full((columns, len(q_values)), none, dtype=index_dtype, device=q_values.device)
    queries = live_tokens(operands.q_starts, operands.q_lengths, operands.q_keep)
    documents = live_tokens(operands.d_starts, operands.d_lengths, operands.d_keep)
    if sums.numel() == 0 or len(queries.row) == 0 or len(documents.row) == 0:
        return sums, counts, winners

    # A larger k passes the same tokens, and would make blocks of queries smaller.
    k = min(k, len(documents.row) + 1)
    rows_at_once = max(1, BLOCK_ELEMENTS // max(BLOCK_TOKENS, BLOCK_TOKENS_OF_K * k))
    blocks = [len(counts) for counts in split_prefixes(queries.count.tolist(), rows_at_once)]
    for block in torch.arange(len(operands.q_starts), device=q_values.device).split(blocks):
        rows = rows_of(queries, block)
        maxima = _Maxima(q_values[rows].to(dtype), d_values, documents, k)
        passes = maxima.passing(operands.zero_floor, documents.count == 0, zeros_compete=not count_retrieved)
        best, position = maxima.best, maxima.position
        if candidates is not None:
            own = candidates[block].repeat_interleave(queries.count[block], dim=0)
            passes, best, position = passes.gather(1, own), best.gather(1, own), position.gather(1, own)
        best = best.masked_fill(~passes, 0)
        counted = passes if count_retrieved else best > 0
        for total, values in ((sums, best), (counts, counted.to(dtype))):
            total[block] = torch.segment_reduce(values, "sum", lengths=queries.count[block], axis=0)
        if want_winners:
            winners[:, rows] = position.masked_fill(~passes, none).t().to(index_dtype)
    return sums, counts, winners
