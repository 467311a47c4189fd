"""What the sparse index is compared with: on a GPU a published kernel, written from its description, cuSPARSE, a dense
product and splade-index; on a CPU splade-index, Seismic and BMP.

Each is made of a list of SparseBatches, has ``nbytes``, and ``search(queries, k)`` returns float32 scores and positions.
In another library it takes what ``prepare`` makes of queries, and returns what ``found`` makes scores and positions of.
"""

from __future__ import annotations

import os
import tempfile
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from pylate_fastmaxsim import SparseBatch

ALIGNED = 32  # a term's list begins at a multiple of this
ROWS_OF_TOP_K = 100  # queries that torch.topk takes at a time
DOCUMENTS_PER_MATRIX = 400_000  # cuSPARSE: its scores of 500 queries take about 1 GB

# Of Seismic's published settings for MS MARCO and SPLADE that for 95% of the best ten in the least memory.
SEISMIC_BUILD = {
    "n_postings": 2000,
    "centroid_fraction": 0.1,
    "summary_energy": 0.4,
    "max_fraction": 4.0,
    "min_cluster_size": 10,
}
SEISMIC_SEARCH = {"query_cut": 7, "heap_factor": 0.8, "n_knn": 0, "sorted": False}
BMP_BLOCK = 32  # documents
LARGEST_WEIGHT = 3.5

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


class Dense:
    """A float16 matrix of all documents, multiplied by ``torch.compile``."""

    def __init__(self, collection: list[SparseBatch]) -> None:
        first = collection[0]
        width = -(-first.vocabulary // 8) * 8  # as its kernels want it; it would be padded in each call
        self.matrix = torch.zeros(sum(map(len, collection)), width, dtype=torch.float16, device=first.device)
        start = 0
        for chunk in collection:
            self.fill(self.matrix[start : start + len(chunk)], chunk)
            start += len(chunk)
        self.best = torch.compile(self.product, dynamic=False) if first.device.type == "cuda" else self.product

    @property
    def nbytes(self) -> int:
        return self.matrix.nbytes

    @staticmethod
    def fill(matrix: Tensor, batch: SparseBatch) -> None:
        rows = torch.arange(len(batch), device=batch.device).repeat_interleave(batch.offsets.diff())
        matrix[rows, batch.terms.long()] = batch.weights.half()

    @staticmethod
    def product(queries: Tensor, matrix: Tensor, k: int) -> Found:
        return torch.topk(queries @ matrix.T, k)

    def search(self, queries: SparseBatch, k: int) -> Found:
        rows = self.matrix.new_zeros(len(queries), self.matrix.shape[1])
        self.fill(rows, queries)
        return self.best(rows, self.matrix, min(k, len(self.matrix)))


class SpladeIndex:
    """splade-index: its GPU engine, or on a CPU its Numba engine on all cores. It takes an encoder, which this stands for."""

    def __init__(self, collection: list[SparseBatch]) -> None:
        from splade_index import SPLADE
        from splade_index.pytorch import SPLADE_GPU

        batch, self.tokenizer = SparseBatch.concatenate(collection), self
        terms, order = batch.terms.int().sort(stable=True)
        rows = torch.arange(len(batch), device=batch.device).repeat_interleave(batch.offsets.diff())[order]
        starts = torch.nn.functional.pad(terms.bincount(minlength=batch.vocabulary).cumsum(0), (1, 0))
        values = starts.cpu(), rows.cpu(), batch.weights[order].float().cpu()  # it moves them itself
        self.documents = torch.sparse_csc_tensor(*values, size=(len(batch), batch.vocabulary), check_invariants=False)
        self.asked = self.prepare(batch.select(torch.arange(1, device=batch.device)))  # it searches once to compile
        cuda = batch.device.type == "cuda"
        self.engine, self.threads = (SPLADE_GPU(), 0) if cuda else (SPLADE(backend="numba"), os.cpu_count())
        self.engine.index(self, [""] * len(batch), show_progress=False)
        self.nbytes = sum(self.engine.scores[name].nbytes for name in ("data", "indices", "indptr"))
        del self.documents

    def prepare(self, queries: SparseBatch) -> list[Tensor]:
        lengths = queries.offsets.diff().tolist()
        parts = zip(
            *(each.cpu().split(lengths) for each in (queries.terms.long(), queries.weights.float())), strict=True
        )
        size = (queries.vocabulary,)
        return [torch.sparse_coo_tensor(terms[None], weights, size).coalesce() for terms, weights in parts]

    def encode_document(self, documents: list[str], **_: object) -> Tensor:
        return self.documents

    def encode_query(self, queries: list[str], **_: object) -> list[Tensor]:
        return self.asked

    def get_vocab(self) -> dict[str, int]:
        return {}

    def search(self, queries: list[Tensor], k: int) -> tuple:
        self.asked = queries
        return self.engine.retrieve([""] * len(queries), k, show_progress=False, n_threads=self.threads)

    def found(self, results: tuple) -> Found:
        return torch.tensor(results.scores), torch.tensor(results.doc_ids)


class Seismic:
    """Seismic's approximate index, on all cores."""

    def __init__(self, collection: list[SparseBatch]) -> None:
        from seismic import SeismicIndexRaw

        self.folder = tempfile.TemporaryDirectory()
        self.engine = SeismicIndexRaw.build(self.written(collection), **SEISMIC_BUILD)
        self.engine.save(f"{self.folder.name}/index")
        (saved,) = Path(self.folder.name).glob("index*")
        self.nbytes = saved.stat().st_size

    def written(self, batches: list[SparseBatch]) -> str:
        """A file of the number of vectors, and of each the number of its terms, its terms and its weights, in 32 bits."""
        with tempfile.NamedTemporaryFile(dir=self.folder.name, delete=False) as file:
            file.write(np.uint32(sum(map(len, batches))))
            for batch in batches:
                offsets = batch.offsets.numpy()
                counts, heads = np.diff(offsets), 2 * offsets[:-1] + np.arange(len(batch))
                places = np.arange(offsets[-1]) + (1 + heads - offsets[:-1]).repeat(counts)
                words = np.empty(2 * offsets[-1] + len(batch), np.uint32)
                words[heads], words[places] = counts, batch.terms.int().numpy()
                words[places + counts.repeat(counts)] = batch.weights.float().numpy().view(np.uint32)
                file.write(words)
        return file.name

    def prepare(self, queries: SparseBatch) -> str:
        return self.written([queries])

    def search(self, queries: str, k: int) -> list:
        return self.engine.batch_search(queries, k, **SEISMIC_SEARCH)

    def found(self, results: list) -> Found:
        return as_tensors(results)


class BlockMaxPruning:
    """BMP, with all terms and blocks (``alpha`` and ``beta`` of 1), one query after the other. It keeps weights in 8 bits."""

    def __init__(self, collection: list[SparseBatch]) -> None:
        from bmp import Indexer, Searcher

        with tempfile.NamedTemporaryFile() as file:
            index = Indexer(file.name, BMP_BLOCK, False)
            for number, impacts in enumerate(each for chunk in collection for each in self.prepare(chunk)):
                index.add_document(str(number), impacts)
            index.finish()
            self.nbytes, self.engine = Path(file.name).stat().st_size, Searcher(file.name)

    def prepare(self, batch: SparseBatch) -> list[dict[str, int]]:
        impacts = (batch.weights.float() * (255 / LARGEST_WEIGHT)).round().clamp(1, 255).int().tolist()
        terms = [*map(str, batch.terms.tolist())]
        return [dict(zip(terms[a:b], impacts[a:b], strict=True)) for a, b in pairwise(batch.offsets.tolist())]

    def search(self, queries: list[dict[str, int]], k: int) -> list:
        return [self.engine.search(query, k, 1.0, 1.0) for query in queries]

    def found(self, results: list) -> Found:
        return as_tensors([[*zip(scores, map(int, names), strict=True)] for names, scores in results])


def as_tensors(results: list[list[tuple[float, int]]]) -> Found:
    """Pairs of scores and positions, of which rows may have fewer than others."""
    longest = max(map(len, results))
    rows = [[*row, *[(0.0, -1)] * (longest - len(row))] for row in results]
    scores, positions = torch.tensor(rows, dtype=torch.float64).unbind(2)
    return scores.float(), positions.long()
