"""Ranks that each hold a share of an index find, together, the same bits as one that holds all."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from pylate_fastmaxsim import SparseBatch, SparseIndex
from pylate_fastmaxsim.kernels.sparse import postings
from tests.support.sparse_vectors import assert_same, sorted_scores, sparse_vectors

VOCABULARY = 30


def _documents(blocks: float) -> SparseBatch:
    return sparse_vectors(round(blocks * postings.DOCUMENTS_PER_BLOCK), VOCABULARY, seed=round(8 * blocks))


def _index(folder: str, blocks: float, removed: tuple[int, ...] = (), **options) -> SparseIndex:
    """This rank's share of an index that rank 0 writes, by default."""
    cpu = dist.get_backend() == "gloo"
    if cpu:
        postings.DOCUMENTS_PER_BLOCK = 8
    path = Path(folder) / f"index-{blocks}-{len(removed)}"
    if dist.get_rank() == 0 and not path.exists():
        index = SparseIndex.build([_documents(blocks)])
        index.remove(removed)
        index.save(path)
    dist.barrier()
    options = {"shard": (dist.get_rank(), dist.get_world_size()), **options}
    return SparseIndex.load(path, "cpu" if cpu else "cuda", **options)


def _same_as_whole(folder: str) -> None:
    # With one block all ranks but the last have no document. Scores are equal in masses, also across ranks.
    for blocks, removed in ((1, ()), (4.625, ()), (4.625, (0, 20, 36)), (0.125, (0,))):
        index = _index(folder, blocks, removed)
        documents = _documents(blocks)
        assert len(index) == len(documents)
        for queries in (sparse_vectors(11, VOCABULARY, seed=1), sparse_vectors(0, VOCABULARY, seed=1)):
            for k in (1, 5, 50):
                expected = sorted_scores(queries, documents, k, {*removed})
                assert_same(index.search(queries.to(index.device), k), [each[:, : len(documents)] for each in expected])
    sizes = [None] * dist.get_world_size()
    dist.all_gather_object(sizes, _index(folder, 4.625).nbytes)
    whole = _index(folder, 4.625, shard=None).nbytes
    assert sum(sizes) == whole and max(sizes) < 0.75 * whole


def _different_questions(folder: str) -> None:
    index = _index(folder, 4.625)
    rank = dist.get_rank()
    same = SparseBatch.from_lists([[(0, 1.0)], [(1, 2.0)], [(2, 4.0)]], VOCABULARY)  # as long in any order
    own = sparse_vectors(3, VOCABULARY, seed=1 + rank)
    in_other_order = same.select(torch.tensor([0, 1, 2] if rank else [2, 1, 0]))
    more = sparse_vectors(3 + rank, VOCABULARY, seed=1)
    for queries, k in ((own, 5), (same, 5 + rank), (in_other_order, 5), (more, 5)):
        with pytest.raises(ValueError, match="^SparseIndex.search: all ranks must pass the same queries and k"):
            index.search(queries.to(index.device), k)
    index.search(same.to(index.device), 5)


def _what_a_shard_cannot_do(folder: str) -> None:
    index, queries = _index(folder, 4.625, shard=(0, 99)), sparse_vectors(3, VOCABULARY, seed=1)
    changed = "an index that was loaded as a shard cannot be"
    queries = queries.to(index.device)
    for call, said in (
        (lambda: index.add([]), f"add: {changed}"),
        (lambda: index.remove([0]), f"remove: {changed}"),
        (lambda: index.compact(), f"compact: {changed}"),
        (lambda: index.vectors([0]), "vectors: an index that was loaded as a shard knows only its own documents; load"),
        (lambda: index.save(folder), f"save: {changed}"),
        (lambda: index.search(queries, 5), "search: the index was loaded for rank 0 of 99, but this is"),
        (lambda: _index(folder, 4.625, shard=(2, 2)), "load: shard must be a rank from 0 and a larger number of ranks"),
    ):
        with pytest.raises(ValueError, match=f"^SparseIndex.{said}"):
            call()


def _different_states(folder: str) -> None:
    index = _index(folder, 2.5)
    path = Path(folder) / "index-2.5-0"
    if dist.get_rank() == 0:
        whole = SparseIndex.load(path)
        whole.add([_documents(1)])
        whole.save(path)
        index = _index(folder, 2.5)
    else:
        dist.barrier()
    with pytest.raises(ValueError, match="^SparseIndex.search: ranks have loaded different states of the index; load"):
        index.search(sparse_vectors(3, VOCABULARY, seed=1).to(index.device), 5)


CASES = {
    "different states": _different_states,
    "same as whole": _same_as_whole,
    "different questions": _different_questions,
    "what a shard cannot do": _what_a_shard_cannot_do,
}


ON_GPUS = pytest.mark.cuda, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.mark.process
@pytest.mark.parametrize(
    "outcomes", [[2], pytest.param([torch.cuda.device_count(), "nccl"], marks=ON_GPUS)], indirect=True
)
@pytest.mark.parametrize("case", CASES)
def test_shards(outcomes, case):
    for rank, outcome in enumerate(outcomes(case)):
        assert outcome == "passed", f"rank {rank}: {outcome}"
