"""The exact MaxSim top-k of static models, from rows of W: the similarities of a query token to all document tokens.

A document's maximum for a query token is that of the row's entries at the ids of its tokens. So a token of the queries
costs one product with the tokens that occur and a look-up for each token of the documents, in however many queries it
stands.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag, pad

from pylate_fastmaxsim.codec import chunks
from pylate_fastmaxsim.retrieval.static.tokens import TokenIds
from pylate_fastmaxsim.retrieval.topk import merge
from pylate_fastmaxsim.sparse import SparseBatch

# Rows of W that are held at once: a look-up reads 512 bytes of float64, and a table of 30,522 tokens takes 15 MiB.
ROWS_AT_ONCE = 64

# Documents and their tokens that are scored at once, and queries: scores take up to 128 MiB.
DOCUMENTS_AT_ONCE = 1 << 14
TOKENS_AT_ONCE = 1 << 24
QUERIES_AT_ONCE = 1 << 10

# Of so many query tokens on, sorting out the tokens that repeat in a document takes less time than it saves.
DISTINCT_FROM = 256


def rows_search(
    queries: SparseBatch, batches: Iterable[TokenIds], query_vectors: Tensor, document_vectors: Tensor, k: int
) -> tuple[Tensor, Tensor]:
    """The ``k`` documents of each query with the highest MaxSim, by the definition, in float64.

    ``queries`` weigh tokens; ``batches`` are the token ids of all documents, none of which is kept. Returns scores
    (rounded to float32) and positions ``[Nq, min(k, Nd)]``, best first and of equal scores the lower position, on the
    device of the tables.
    """
    device = query_vectors.device
    best = torch.empty(len(queries), 0, device=device)
    positions = torch.empty(len(queries), 0, dtype=torch.int64, device=device)
    costs = torch.ones(len(document_vectors), dtype=torch.int64, device="cpu")
    first = 0
    for batch in batches:
        for part in batch.parts(DOCUMENTS_AT_ONCE, costs, TOKENS_AT_ONCE):
            found = []
            for rows in torch.arange(len(queries), device=device).split(QUERIES_AT_ONCE):
                asked = queries.select(rows.to(queries.device)).to(device)
                scores = maxsim_scores(asked, part, query_vectors, document_vectors).float()
                found.append(merge(best[rows], positions[rows], scores, first, k))
            if found:
                best, positions = map(torch.cat, zip(*found, strict=True))
            first += len(part)
    return best, positions


def maxsim_scores(queries: SparseBatch, tokens: TokenIds, query_vectors: Tensor, document_vectors: Tensor) -> Tensor:
    """MaxSim of all queries and documents, ``[Nq, Nd]``, float64; of a document without tokens 0."""
    terms, columns = queries.terms.long().unique(return_inverse=True)
    weights = query_vectors.new_zeros(len(queries), len(terms), dtype=torch.float64)
    rows = torch.repeat_interleave(torch.arange(len(queries), device=weights.device), queries.offsets.diff())
    weights[rows, columns] = queries.weights.double()
    scores = weights.new_zeros(len(queries), len(tokens))
    for part, maxima in row_maxima(query_vectors[terms], tokens, document_vectors):
        scores.addmm_(weights[:, part], maxima.T)
    return scores


def row_maxima(query_vectors: Tensor, tokens: TokenIds, document_vectors: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Some of the query vectors ``[U, d]``, and the largest similarity of each to a token of each document.

    Maxima are ``[Nd, R]``, float64, of a document without tokens 0.
    """
    device = document_vectors.device
    ids, offsets = tokens.ids.to(device).long(), tokens.offsets.to(device)
    if len(query_vectors) >= DISTINCT_FROM:
        documents, ids, _ = tokens.counts(len(document_vectors), device)
        offsets = pad(documents.bincount(minlength=len(tokens)).cumsum(0), (1, 0))
    occurs = torch.zeros(len(document_vectors), dtype=torch.bool, device=device)
    occurs[ids] = True
    vectors = document_vectors[occurs].double()
    ids = (occurs.cumsum(0) - 1)[ids]
    for part in chunks(len(query_vectors), 1, ROWS_AT_ONCE):
        similarities = vectors @ query_vectors[part].double().T
        if len(ids) == 0:  # of which PyTorch takes no maximum
            yield part, similarities.new_zeros(len(tokens), similarities.shape[1])
            continue
        yield part, embedding_bag(ids, similarities, offsets, mode="max", include_last_offset=True)
