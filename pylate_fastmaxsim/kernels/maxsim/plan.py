"""The launch of the forward, cached by sizes, so that a training step looks it up."""

import functools
from typing import NamedTuple

import torch

from pylate_fastmaxsim._winners import no_winner
from pylate_fastmaxsim.kernels.maxsim.tiles import ForwardTiles, documents_per_program, forward_tiles
from pylate_fastmaxsim.kernels.runtime.arch import INPUT_PRECISION, arithmetic, cdiv, next_power_of_2


class ForwardPlan(NamedTuple):
    programs: int
    num_tiles: int
    # Blocks of rows that each query is cut into. Each adds its part to the query's scores.
    row_blocks: int
    documents_per_program: int
    # Of the kernel and of Triton, by name. Shared by all calls of these sizes: do not change it.
    constants: dict[str, int | bool | str | None]


@functools.lru_cache(maxsize=1024)
def forward_plan(
    architecture: int,
    dtype: torch.dtype,
    precision: str,
    dim: int,
    num_queries: int,
    max_q_length: int,
    num_slots: int,
    with_candidates: bool,
    want_winners: bool,
    index_dtype: torch.dtype,
    tiles: ForwardTiles | None,
) -> ForwardPlan:
    """Each query scores `num_slots` documents, with candidates its own ones. ``tiles=None``: those of the tables."""
    rows_in_all = query_rows(num_queries, max_q_length, with_candidates)
    kind = arithmetic(dtype, precision)
    tile = tiles or forward_tiles(
        architecture, kind, dim, rows_in_all, want_winners, next_power_of_2(max_q_length)
    )  # fmt: skip
    plan = plan_of_tiles(tile, precision, dim, num_queries, max_q_length, num_slots, with_candidates)
    constants = plan.constants | {"WANT_WINNERS": want_winners, "SENTINEL": no_winner(index_dtype)}
    return plan._replace(constants=constants)


def query_rows(num_queries: int, max_q_length: int, with_candidates: bool) -> int:
    """Query rows that share their documents, padded so that queries fill a tile."""
    rows_per_query = next_power_of_2(max_q_length)
    return rows_per_query if with_candidates else rows_per_query * num_queries


def plan_of_tiles(
    tile: ForwardTiles,
    precision: str,
    dim: int,
    num_queries: int,
    max_q_length: int,
    num_slots: int,
    with_candidates: bool,
) -> ForwardPlan:
    """The launch of a forward with such tiles: the constants that all of them have."""
    rows_per_query = next_power_of_2(max_q_length)
    one_query = with_candidates or rows_per_query >= tile.block_m
    row_blocks = cdiv(max_q_length, tile.block_m)
    num_tiles = num_queries * row_blocks if one_query else cdiv(num_queries, tile.block_m // rows_per_query)
    per_program = documents_per_program(tile, num_tiles, num_slots)
    constants = {
        "DIM": dim,
        "ROWS_PER_QUERY": tile.block_m if one_query else rows_per_query,
        "ONE_QUERY": one_query,
        "PRECISION": INPUT_PRECISION[precision],
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
        "maxnreg": tile.max_registers,
    }
    return ForwardPlan(num_tiles * cdiv(num_slots, per_program), num_tiles, row_blocks, per_program, constants)
