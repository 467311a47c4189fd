"""The exact MaxSim top-k by rescoring candidates of a sparse search, until no other document can be among them."""

from collections.abc import Callable

import torch
from torch import Tensor

from pylate_fastmaxsim.ops.maxsim import maxsim
from pylate_fastmaxsim.retrieval.static.documents import ENTRIES_AT_ONCE, token_vectors
from pylate_fastmaxsim.retrieval.static.tokens import TokenIds
from pylate_fastmaxsim.sparse import SparseBatch
from pylate_fastmaxsim.tokens import TokenBatch

# Candidates beyond k of the first search.
MORE_THAN_ASKED = 32

# A search that has to go deeper goes this many times as deep.
DEEPER = 4

# Results of a search that are held at once: 192 MiB.
PAIRS_AT_ONCE = 1 << 24

# Stored weights, query weights' products and scores are rounded to float32 once each, by at most 2**-24.
ROUNDING = 1 + 2.0**-22


def certified_search(
    search: Callable[[SparseBatch, int], tuple[Tensor, Tensor]],
    queries: SparseBatch,
    bounds: Tensor,
    tokens: TokenIds,
    live: Tensor,
    query_vectors: Tensor,
    document_vectors: Tensor,
    k: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The ``k`` documents of each query with the highest MaxSim, from candidates of a sparse ``search``.

    ``bounds``, float64 ``[Nq]``, are what added to an exact sparse score makes an upper bound of MaxSim; ``tokens`` are
    those of all documents, and ``live`` the ascending positions of those that may be found. Both tables lie on the device
    that rescores. Returns scores and positions ``[Nq, min(k, live)]``, best first and of equal ones the lower position,
    and for how many documents of each query MaxSim was computed, all on the CPU.
    """
    k = min(k, len(live))
    best = torch.full((len(queries), k), -torch.inf, device="cpu")
    positions = torch.full((len(queries), k), -1, device="cpu")
    rescored = torch.zeros(len(queries), dtype=torch.int64, device="cpu")
    if k == 0:
        return best, positions, rescored
    scorer = _Scorer(tokens, query_vectors, document_vectors)
    active, seen, depth = torch.arange(len(queries), device="cpu"), 0, min(k + MORE_THAN_ASKED, len(live))
    while len(active):
        left = []
        for rows in active.split(max(1, PAIRS_AT_ONCE // depth)):
            asked = queries.select(rows.to(queries.device))
            # A deeper search begins with the results of the one before.
            upper, found = (each.cpu() for each in search(asked, depth))
            new = found[:, seen:]
            best[rows], positions[rows] = _merged(best[rows], positions[rows], scorer(asked, new), new, k)
            rescored[rows] += (new >= 0).sum(dim=1)
            # What is not found scores at most as much as the last, or shares no term.
            bound = (upper[:, -1].double() * ROUNDING + bounds[rows]).float()
            done = best[rows, -1] > bound
            done |= (found >= 0).sum(dim=1) == len(live)
            for row in ((found[:, -1] < 0) & ~done).nonzero().flatten().tolist():
                rest = live[~torch.isin(live, found[row])][None]
                query = rows[row : row + 1]
                scores = scorer(queries.select(query.to(queries.device)), rest)
                best[query], positions[query] = _merged(best[query], positions[query], scores, rest, k)
                rescored[query] += rest.shape[1]
                done[row] = True
            left.append(rows[~done])
        active, seen, depth = torch.cat(left), depth, min(depth * DEEPER, len(live))
    return best, positions, rescored


def _merged(best: Tensor, positions: Tensor, scores: Tensor, new: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The ``k`` best of each row, of equal ones the lowest positions. Where there is no document, scores are -inf."""
    scores, positions = torch.cat([best, scores], dim=1), torch.cat([positions, new], dim=1)
    positions, order = positions.sort(dim=1, stable=True)
    scores, order = scores.gather(1, order).sort(dim=1, descending=True, stable=True)
    return scores[:, :k], positions.gather(1, order)[:, :k]


class _Scorer:
    """MaxSim of queries and candidates from token ids, in float64, rounded to float32."""

    def __init__(self, tokens: TokenIds, query_vectors: Tensor, document_vectors: Tensor) -> None:
        self._tokens, self._query_vectors, self._document_vectors = tokens, query_vectors, document_vectors
        mean = len(tokens.ids) // max(1, len(tokens)) + 1
        self._pairs = max(1, ENTRIES_AT_ONCE // (mean * max(1, query_vectors.shape[1])))

    def __call__(self, queries: SparseBatch, candidates: Tensor) -> Tensor:
        """Scores ``[Nq, K]`` of candidates ``[Nq, K]``; -inf where there is none, which is marked by -1. On the CPU."""
        scores = torch.full(candidates.shape, -torch.inf, device="cpu")
        columns = min(self._pairs, max(1, candidates.shape[1]))
        rows = max(1, self._pairs // columns)
        for begin in range(0, len(queries), rows):
            numbers = torch.arange(begin, min(begin + rows, len(queries)), device=queries.device)
            part = self._vectors(queries.select(numbers))
            for first in range(0, candidates.shape[1], columns):
                block = candidates[begin : begin + rows, first : first + columns]
                documents, places = block.clamp(min=0).unique(return_inverse=True)
                vectors = token_vectors(self._tokens.select(documents), self._document_vectors)
                found = maxsim(part, vectors, places.to(part.device)).float().cpu()
                scores[begin : begin + rows, first : first + columns] = found.masked_fill(block < 0, -torch.inf)
        return scores

    def _vectors(self, queries: SparseBatch) -> TokenBatch:
        # A weight multiplies the similarities of a token, thus their maximum.
        device = self._query_vectors.device
        vectors = self._query_vectors[queries.terms.long().to(device)].double()
        vectors *= queries.weights.double().to(device)[:, None]
        longest = int(queries.offsets.diff().max())
        return TokenBatch.from_packed(vectors, queries.offsets.to(device), max_length=longest)
