"""MaxSim in plain PyTorch: the definition that every faster path is tested against.

Clarity over speed and memory: everything is padded, and the whole similarity tensor is held.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pylate_fastmaxsim.tokens import TokenBatch


def _token_maxima(
    queries: TokenBatch, documents: TokenBatch, candidates: Tensor | None, zero_floor: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Best similarity of every query token in every document, ``[Nq, P, Lq]``, where it is, and the live query tokens."""
    query_values, query_mask = queries.to_padded()
    document_values, document_mask = documents.to_padded()

    # The maximum starts at a floor: 0 where there is no live token or where the caller asks for it, else -inf.
    # As the first entry of each row it also wins a tie, so a winner is a token that is strictly better.
    floor_is_zero = ~document_mask.any(dim=1)
    if zero_floor is not None:
        floor_is_zero = floor_is_zero | zero_floor
    floor = torch.where(floor_is_zero, 0.0, -torch.inf).to(document_values.dtype)

    if candidates is None:
        similarities = torch.einsum("qsh,dth->qdst", query_values, document_values)
        live, floor = document_mask[None, :, None, :], floor[None, :, None, None]
    else:
        similarities = torch.einsum("qsh,qdth->qdst", query_values, document_values[candidates])
        live, floor = document_mask[candidates][:, :, None, :], floor[candidates][:, :, None, None]
    similarities = similarities.masked_fill(~live, -torch.inf)
    floor = floor.expand(*similarities.shape[:-1], 1)
    maxima, position = torch.cat([floor, similarities], dim=-1).max(dim=-1)
    return maxima, position - 1, query_mask


def maxsim(
    queries: TokenBatch,
    documents: TokenBatch,
    candidates: Tensor | None = None,
    zero_floor: Tensor | None = None,
) -> Tensor:
    """Score queries against documents: each live query token takes its best live document token; sum over query tokens.

    ``score[i, j] = sum over live s of (max over live t of <q_is, d_jt>)``. The first of equal maxima
    wins (it receives the gradient), a document without a live token scores 0, and NaN in a live token
    gives NaN in every score that uses it.

    Parameters
    ----------
    queries
        Nq queries of d-dimensional token vectors.
    documents
        Nd documents, same d and dtype.
    candidates
        Which documents each query scores, ``[Nq, K]``, int64, repeats allowed; ``None`` means all.
    zero_floor
        Documents whose maxima start at 0 instead of -inf, ``[Nd]``, bool. ``None`` means no document.

    Returns
    -------
    Tensor
        Scores ``[Nq, Nd]``, or ``[Nq, K]`` with candidates, in the dtype of the values.

    Examples
    --------
    >>> import torch
    >>> from pylate_fastmaxsim import TokenBatch, reference
    >>> queries = TokenBatch.from_list([torch.tensor([[1.0, 0.0], [0.0, 1.0]])])
    >>> documents = TokenBatch.from_list([torch.tensor([[0.5, 0.0], [2.0, -1.0]]), torch.ones(1, 2)])
    >>> reference.maxsim(queries, documents)
    tensor([[2., 2.]])
    """
    maxima, _, query_mask = _token_maxima(queries, documents, candidates, zero_floor)
    return maxima.masked_fill(~query_mask[:, None, :], 0).sum(dim=-1)


def maxsim_winners(
    queries: TokenBatch,
    documents: TokenBatch,
    candidates: Tensor | None = None,
    zero_floor: Tensor | None = None,
) -> Tensor:
    """Which token of each document attains the maximum, for every row of ``queries.values``.

    Returns
    -------
    Tensor
        ``[P, Tq]``, int64, P = Nd or K: row of the winner counted from its document's start; -1 where
        there is none, which includes masked rows and rows that belong to no query.

    Examples
    --------
    >>> import torch
    >>> from pylate_fastmaxsim import TokenBatch, reference
    >>> queries = TokenBatch.from_list([torch.tensor([[1.0, 0.0], [0.0, 1.0]])])
    >>> documents = TokenBatch.from_list([torch.tensor([[0.5, 0.0], [2.0, -1.0]]), torch.empty(0, 2)])
    >>> reference.maxsim_winners(queries, documents)
    tensor([[ 1,  0],
            [-1, -1]])
    """
    _, winner, query_mask = _token_maxima(queries, documents, candidates, zero_floor)
    rows = (queries.starts[:, None] + torch.arange(queries.max_length, device=queries.device))[query_mask]
    winners = torch.full((winner.shape[1], queries.values.shape[0]), -1, device=queries.device)
    winners[:, rows] = winner.transpose(0, 1)[:, query_mask]
    return winners
