"""MaxSim's kernels as one path: scores and winners, and the gradients of these winners."""

from __future__ import annotations

from typing import NamedTuple

from pylate_fastmaxsim.kernels.maxsim import launch as scores
from pylate_fastmaxsim.kernels.maxsim.tiles import ForwardTiles
from pylate_fastmaxsim.kernels.winner_backward import launch as gradients
from pylate_fastmaxsim.kernels.winner_backward.tiles import FROM_TABLES, BackwardTiles


class Tiles(NamedTuple):
    """Tiles of forward and backward; by default those of the tables."""

    forward: ForwardTiles | None = None
    backward: BackwardTiles = FROM_TABLES


OF_TABLES = Tiles()


def forward(operands, want_winners, precision, tiles=OF_TABLES):
    return scores.forward(operands, want_winners, precision, tiles.forward)


def backward(grad_scores, winners, operands, precision, need_q, need_d, tiles=OF_TABLES):
    return gradients.backward(grad_scores, winners, operands, precision, need_q, need_d, tiles.backward)
