"""Document tokens that win by the definitions of ``reference``: what operators must store for the backward."""

from __future__ import annotations

import torch
from torch import Tensor

from pylate_fastmaxsim import TokenBatch, reference


def maxsim_winners(
    queries: TokenBatch,
    documents: TokenBatch,
    candidates: Tensor | None = None,
    zero_floor: Tensor | None = None,
) -> Tensor:
    """Token of each document with the maximum, for every row of ``queries.values``: its position, int64 ``[P, Tq]``.

    P is Nd or K. -1 where there is none, as for masked rows and rows of no query.

    """
    _, winner, query_mask = reference._token_maxima(queries, documents, candidates, zero_floor)
    return _by_row(winner, query_mask, queries)


def _by_row(winner: Tensor, query_mask: Tensor, queries: TokenBatch) -> Tensor:
    """Winners ``[Nq, P, Lq]`` as ``[P, Tq]``, a column for every row of ``queries.values``."""
    rows = (queries.starts[:, None] + torch.arange(queries.max_length, device=queries.device))[query_mask]
    winners = torch.full((winner.shape[1], queries.values.shape[0]), -1, device=queries.device)
    winners[:, rows] = winner.transpose(0, 1)[:, query_mask]
    return winners


def top_k_winners(queries: TokenBatch, documents: TokenBatch, k: int, candidates: Tensor | None = None) -> Tensor:
    """Positions of the ``k`` largest similarities, ``[P, k, Tq]``, in the form of ``maxsim_winners``."""
    similarities, query_mask, _, live = reference._similarities(queries, documents, candidates)
    _, position, taken = reference._k_largest(similarities, live, k)
    position = position.masked_fill(~taken, -1)
    position = torch.nn.functional.pad(position, (0, k - position.shape[-1]), value=-1)
    return torch.stack([_by_row(rank, query_mask, queries) for rank in position.unbind(dim=-1)], dim=1)


def xtr_winners(
    queries: TokenBatch,
    documents: TokenBatch,
    k: int,
    candidates: Tensor | None = None,
    zero_floor: Tensor | None = None,
    normalizer: str = "positive",
) -> Tensor:
    """Token of each document that :func:`xtr_scores` takes its value from, in the form of ``maxsim_winners``."""
    _, winner, query_mask = reference._xtr_token_maxima(queries, documents, k, candidates, zero_floor, normalizer)
    return _by_row(winner, query_mask, queries)


def splade_winners(
    hidden: TokenBatch, weight: Tensor, bias: Tensor | None = None, activation_function: str | None = "relu"
) -> Tensor:
    """Position in its text of the token that gets each gradient of :func:`splade_pool`, int64 ``[N, V]``; -1 for none."""
    maxima, winners = reference._logit_maxima(hidden, weight, bias)
    return winners if activation_function is None else winners.masked_fill(maxima <= 0, -1)
