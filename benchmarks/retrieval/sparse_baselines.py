"""What the sparse index is compared with: a published kernel, written from its description, and cuSPARSE.

Each is made of a list of SparseBatches, has ``nbytes``, and ``search(queries, k)`` returns float32 scores and positions.
They add in float32; the scatter-add in an order of chance.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pylate_fastmaxsim import SparseBatch

ALIGNED = 32  # a term's list begins at a multiple of this
ROWS_OF_TOP_K = 100  # queries that torch.topk takes at a time
DOCUMENTS_PER_MATRIX = 400_000  # cuSPARSE: its scores of 500 queries take about 1 GB

Found = tuple[Tensor, Tensor]


@triton.jit
def _scatter_add(
    documents, weights, starts, lengths, query_offsets, query_terms, query_weights, scores, count, BLOCK: tl.constexpr
):
    """A program adds the list of one term of one query into the query's row of scores."""
    query = tl.program_id(0)
    place = tl.load(query_offsets + query) + tl.program_id(1)
    if place < tl.load(query_offsets + query + 1):
        term = tl.load(query_terms + place)
        factor = tl.load(query_weights + place)
        start = tl.load(starts + term)
        length = tl.load(lengths + term)
        row = scores + query.to(tl.int64) * count
        for first in range(0, length, BLOCK):
            at = first + tl.arange(0, BLOCK)
            live = at < length
            document = tl.load(documents + start + at, mask=live, other=0)
            weight = tl.load(weights + start + at, mask=live, other=0.0)
            tl.atomic_add(row + document, factor * weight, mask=live, sem="relaxed")


def top_k(scores: Tensor, k: int) -> Found:
    """The top ``k`` of each row of a matrix of scores."""
    parts = [rows.topk(min(k, scores.shape[1])) for rows in scores.split(ROWS_OF_TOP_K)]
    return torch.cat([part.values for part in parts]), torch.cat([part.indices for part in parts])


class ScatterAdd:
    """Lists of documents by term; a program for each query and term adds into a ``[queries, documents]`` buffer."""

    def __init__(self, collection: list[SparseBatch]) -> None:
        vocabulary, device = collection[0].vocabulary, collection[0].device
        counts = [torch.bincount(chunk.terms.int(), minlength=vocabulary) for chunk in collection]
        self.lengths = sum(counts)
        room = (self.lengths + ALIGNED - 1) // ALIGNED * ALIGNED
        self.starts = room.cumsum(0) - room
        self.documents = torch.zeros(int(room.sum()), dtype=torch.int32, device=device)
        self.weights = torch.zeros(len(self.documents), device=device)
        self.count, free = 0, self.starts.clone()
        for chunk, of_chunk in zip(collection, counts, strict=True):
            rows = torch.arange(self.count, self.count + len(chunk), device=device, dtype=torch.int32)
            terms, order = chunk.terms.int().sort(stable=True)
            places = (free - of_chunk.cumsum(0) + of_chunk)[terms] + torch.arange(len(terms), device=device)
            self.documents[places] = rows.repeat_interleave(chunk.offsets.diff())[order]
            self.weights[places] = chunk.weights[order].float()
            free += of_chunk
            self.count += len(chunk)

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in (self.documents, self.weights, self.starts, self.lengths))

    def search(self, queries: SparseBatch, k: int) -> Found:
        scores = torch.zeros(len(queries), self.count, device=queries.device)
        grid = (len(queries), int(queries.offsets.diff().max()))
        lists = (self.documents, self.weights, self.starts, self.lengths)
        asked = (queries.offsets, queries.terms.int(), queries.weights.float())
        _scatter_add[grid](*lists, *asked, scores, self.count, BLOCK=128, num_warps=4)
        return top_k(scores, k)


class CuSparse:
    """``torch.sparse.mm`` of CSR matrices, with int32 terms and float32 weights, with dense queries; the top-k of all."""

    def __init__(self, collection: list[SparseBatch]) -> None:
        together = max(1, DOCUMENTS_PER_MATRIX // len(collection[0]))
        self.parts = []
        for first in range(0, len(collection), together):
            part = SparseBatch.concatenate(collection[first : first + together])
            size = (len(part), part.vocabulary)
            values = part.offsets.int(), part.terms.int(), part.weights.float()
            self.parts.append(torch.sparse_csr_tensor(*values, size=size, check_invariants=False))

    @property
    def nbytes(self) -> int:
        arrays = ((part.crow_indices(), part.col_indices(), part.values()) for part in self.parts)
        return sum(each.nbytes for part in arrays for each in part)

    def search(self, queries: SparseBatch, k: int) -> Found:
        columns = torch.zeros(queries.vocabulary, len(queries), device=queries.device)
        rows = torch.arange(len(queries), device=queries.device).repeat_interleave(queries.offsets.diff())
        columns[queries.terms.long(), rows] = queries.weights.float()
        found: list[Found] = []
        start = 0
        for part in self.parts:
            scores, positions = top_k(torch.sparse.mm(part, columns).t().contiguous(), k)
            found = [*found, (scores, positions + start)]
            scores, positions = (torch.cat(each, dim=1) for each in zip(*found, strict=True))
            best, places = top_k(scores, k)
            found = [(best, positions.gather(1, places))]
            start += part.shape[0]
        return found[0]
