"""The launch of the forward of MaxSim, of compressed MaxSim and of the other poolings, from sizes and tiles."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pylate_fastmaxsim._operands import CompressedOperands, ScoringOperands
from pylate_fastmaxsim._winners import no_winner, winner_dtype
from pylate_fastmaxsim.kernels.maxsim.tiles import SHORT_DOCUMENT, ForwardTiles, documents_per_program
from pylate_fastmaxsim.kernels.primitives.live_rows import live_tokens_of
from pylate_fastmaxsim.kernels.runtime.arch import INPUT_PRECISION, cdiv, launch_options, next_power_of_2
from pylate_fastmaxsim.kernels.runtime.tensors import as_bytes

# Constants of documents that are not compressed.
VECTORS = {"FORMAT": "vectors", "PER_TOKEN": False, "BITS": 8}


class ForwardSizes(NamedTuple):
    """Each query scores `num_slots` documents, with candidates its own ones."""

    dim: int
    num_queries: int
    max_q_length: int
    num_slots: int
    with_candidates: bool
    short_documents: bool

    @property
    def query_rows(self) -> int:
        """Query rows that share their documents, padded so that queries fill a tile."""
        rows_per_query = next_power_of_2(self.max_q_length)
        return rows_per_query if self.with_candidates else rows_per_query * self.num_queries

    @classmethod
    def of(cls, operands: ScoringOperands | CompressedOperands) -> ForwardSizes:
        q_values, candidates = operands.q_values, operands.candidates
        num_queries, num_slots = operands.q_starts.shape[0], operands.num_slots
        short = operands.max_d_length <= SHORT_DOCUMENT
        return cls(q_values.shape[1], num_queries, operands.max_q_length, num_slots, candidates is not None, short)

    def nothing_to_score(self, operands: ScoringOperands | CompressedOperands, documents: Tensor) -> bool:
        return 0 in (*self[:4], operands.max_d_length, documents.shape[0])

    def zero_scores(self, operands: ScoringOperands | CompressedOperands) -> Tensor:
        return operands.q_values.new_zeros((self.num_queries, self.num_slots), dtype=torch.float32)


class ForwardPlan(NamedTuple):
    """The grid, and the constants of the kernel and of Triton by name, which all calls of these sizes share."""

    programs: int
    num_tiles: int
    # Blocks of rows that each query is cut into. Each adds its part to the query's scores.
    row_blocks: int
    documents_per_program: int
    constants: dict[str, int | bool | str | None]

    def arguments(self, operands: ScoringOperands | CompressedOperands, sizes: ForwardSizes) -> tuple[tuple, ...]:
        """Arguments: of queries, of documents behind their vectors, and numbers; and memory for scores."""
        queries = operands.q_starts, operands.q_lengths, as_bytes(operands.q_keep)
        live_tokens, d_lengths = live_tokens_of(operands.d_starts, operands.d_lengths, operands.d_keep)
        documents = operands.d_starts, d_lengths, live_tokens, operands.candidates
        num_queries, num_slots, num_rows = sizes.num_queries, sizes.num_slots, operands.q_values.shape[0]
        numbers = num_queries, num_slots, self.num_tiles, num_rows, self.row_blocks, self.documents_per_program
        # Of a query that is cut into blocks, what each of them adds to its scores.
        shape = (num_queries, num_slots) if self.row_blocks == 1 else (self.row_blocks, num_queries, num_slots)
        return queries, documents, numbers, operands.q_values.new_empty(shape, dtype=torch.float32)

    def sum_of_blocks(self, scores: Tensor) -> Tensor:
        return scores if self.row_blocks == 1 else scores.sum(dim=0)


def new_winners(operands: ScoringOperands | CompressedOperands, shape: tuple[int, ...], written: bool) -> Tensor:
    """Memory for winners. The kernel writes neither rows of no query nor dead rows, and none unless `written`."""
    dtype = winner_dtype(operands.max_d_length)
    winners = operands.q_values.new_empty(shape, dtype=dtype)
    if not written or not operands.q_gapless or operands.q_keep is not None:
        winners.fill_(no_winner(dtype))
    return winners


def forward_plan(
    tile: ForwardTiles, precision: str, sizes: ForwardSizes, winners: torch.dtype | None, **constants: int | bool | str
) -> ForwardPlan:
    """The launch with such tiles. It writes `winners` unless None; `constants` are further ones of the kernel."""
    rows_per_query = next_power_of_2(sizes.max_q_length)
    one_query = sizes.with_candidates or rows_per_query >= tile.block_m
    row_blocks = cdiv(sizes.max_q_length, tile.block_m)
    queries_per_tile = 1 if one_query else tile.block_m // rows_per_query
    num_tiles = cdiv(sizes.num_queries, queries_per_tile) * row_blocks
    per_program = documents_per_program(tile, num_tiles, sizes.num_slots)
    constants = {
        **constants,
        "DIM": sizes.dim,
        "ROWS_PER_QUERY": tile.block_m if one_query else rows_per_query,
        "ONE_QUERY": one_query,
        "WANT_WINNERS": winners is not None,
        "SENTINEL": no_winner(winners or torch.uint8),
        "PRECISION": INPUT_PRECISION[precision],
        **launch_options(tile),
    }
    return ForwardPlan(num_tiles * cdiv(sizes.num_slots, per_program), num_tiles, row_blocks, per_program, constants)
