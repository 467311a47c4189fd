"""Documents gathered in several processes have the scores and gradients of one."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from pylate_fastmaxsim import LogSumExp, Max, Softmax, TokenBatch, TopK, maxsim, pooled_scores
from pylate_fastmaxsim.ops.gathered import gather_documents
from pylate_fastmaxsim.pooling import Pooling

DIM = 8


def _documents(rank: int, count: int, longest: int, dtype: torch.dtype, dim: int = DIM) -> TokenBatch:
    """Documents of a rank, with lengths of its own and masked tokens; those of rank 2 have no token at all."""
    generator = torch.Generator().manual_seed(100 + rank)
    lengths = torch.randint(0, longest * (rank + 1), (count,), generator=generator)
    if rank == 2:
        lengths.zero_()
    rows = int(lengths.sum())
    values = torch.randn(rows, dim, generator=generator, dtype=torch.float64).to(dtype)
    keep = torch.rand(rows, generator=generator) < 0.8
    return TokenBatch(values, lengths.cumsum(0) - lengths, lengths, max([0, *lengths.tolist()]), keep)


def _queries(rank: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Queries of a rank, in a number of its own, and their mask."""
    generator = torch.Generator().manual_seed(rank)
    queries = torch.randn(3 + rank, 5, DIM, generator=generator, dtype=torch.float64).to(dtype)
    return queries.requires_grad_(), torch.rand(3 + rank, 5, generator=generator) < 0.9


def _operator(
    dtype: torch.dtype = torch.float64, tolerance: float = 1e-12, floor: bool = False, pooling: Pooling = Max()
) -> Callable[[str], None]:
    """This rank's queries against gathered documents, as all queries and all documents in one process."""

    def score(queries: Tensor, mask: Tensor, documents: TokenBatch, zero_floor: Tensor | None) -> Tensor:
        if floor:
            return maxsim(queries, documents, queries_mask=mask, zero_floor=zero_floor)
        return pooled_scores(queries, documents, queries_mask=mask, pooling=pooling)

    def run(folder: str) -> None:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        shards = [_documents(other, 6, 7, dtype) for other in range(ranks)]
        queries = [_queries(other, dtype) for other in range(ranks)]
        floors = [torch.arange(6) % (2 + other) == 0 if floor else None for other in range(ranks)]
        generator = torch.Generator().manual_seed(0)
        weights = [torch.randn(3 + other, 6 * ranks, generator=generator).pow(9) for other in range(ranks)]
        names = ("values", "lengths", "keep")
        values, lengths, keep = (torch.cat([vars(shard)[name] for shard in shards]) for name in names)
        most = max(shard.max_length for shard in shards)
        everything = TokenBatch(values.requires_grad_(), lengths.cumsum(0) - lengths, lengths, most, keep)
        expected = []
        for (values, mask), weight in zip(queries, weights, strict=True):
            scores = score(values, mask, everything, torch.cat(floors) if floor else None)
            expected.append(scores.detach())
            scores.backward(weight.to(scores.dtype))

        values, mask = _queries(rank, dtype)
        documents = shards[rank].with_values(shards[rank].values.detach().requires_grad_())
        scores = score(values, mask, *gather_documents(documents, floors[rank]))
        scores.backward(weights[rank].to(scores.dtype))
        own = everything.values.grad.split([len(shard.values) for shard in shards])[rank]
        for name, our, gold in (
            ("scores", scores.detach(), expected[rank]),
            ("queries", values.grad, queries[rank][0].grad),
            ("documents", documents.values.grad, own),
        ):
            assert our.dtype == gold.dtype and our.shape == gold.shape, name
            assert (our - gold).abs().max() <= tolerance * gold.abs().max() if our.numel() else True, name

    return run


def _different_kinds(folder: str) -> None:
    """What only the ranks together can see is an error on all of them, before they exchange anything else."""
    odd = dist.get_rank() == dist.get_world_size() - 1
    plain, floor = torch.ones(2, 5, DIM), torch.ones(2, dtype=torch.bool)
    for values, zero_floor, sentence in (
        (torch.ones(3, 5, DIM), None, "must have the same number of documents, got 2, .*3.$"),
        (torch.ones(2, 5, DIM + 1), None, f"must have documents of the same d, got {DIM}, .*{DIM + 1}.$"),
        (plain.double(), None, "must have documents of one dtype, got torch.float32, .*torch.float64.$"),
        (plain, floor, "must give a zero_floor or none must, got False, .*True.$"),
    ):
        values, zero_floor = (values, zero_floor) if odd else (plain, None)
        with pytest.raises(ValueError, match=f"maxsim across ranks: all {sentence}"):
            gather_documents(TokenBatch.from_padded(values), zero_floor)
        # Nothing is left on its way.
        documents, _ = gather_documents(TokenBatch.from_padded(plain))
        assert maxsim(torch.ones(1, 3, DIM), documents).unique().tolist() == [3 * DIM]


def _on_gpu(batch: TokenBatch) -> TokenBatch:
    values, starts, lengths, keep = (each.cuda() for each in (batch.values, batch.starts, batch.lengths, batch.keep))
    return TokenBatch(values, starts, lengths, batch.max_length, keep)


def _gradients_on_gpus(folder: str) -> None:
    """Those of a rank's documents are of the queries of all ranks, and ranks differ in what they have to send."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator("cuda").manual_seed(99)
    queries = torch.randn(ranks, 64, 32, 128, device="cuda", generator=generator).to(torch.bfloat16)
    documents = _on_gpu(_documents(rank, 128, 300, torch.bfloat16, 128))
    documents.values.requires_grad_()
    maxsim(queries[rank], gather_documents(documents)[0]).sum().backward()
    alone = documents.with_values(documents.values.detach().float().requires_grad_())
    maxsim(queries.flatten(0, 1).float(), alone).sum().backward()
    assert (documents.values.grad.float() - alone.values.grad).norm() < 1e-2 * alone.values.grad.norm()


def _waits_for_no_computation(folder: str) -> None:
    """Where the documents of other ranks are is known before the device has done what it was given to do."""

    def layout(documents: TokenBatch) -> tuple:
        """All but the vectors, whose memory the next call takes: allocating more may wait for the device."""
        return documents.max_length, documents.starts, documents.lengths, documents.keep

    documents = _on_gpu(_documents(dist.get_rank(), 128, 300, torch.bfloat16, 128))
    expected = layout(gather_documents(documents)[0])  # and makes the connections
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda._sleep(4 * 10**9)  # cycles: some seconds
    slept = torch.cuda.Event()
    slept.record()
    gathered, _ = gather_documents(documents)
    assert not slept.query()
    # Of one rank there is no mask.
    torch.testing.assert_close(layout(gathered), expected, rtol=0, atol=0)


GPU_CASES = {"gradients on GPUs": _gradients_on_gpus, "waits for no computation": _waits_for_no_computation}
CPU_CASES = {
    "operator": _operator(),
    "operator with a floor": _operator(floor=True),
    "operator in bfloat16": _operator(torch.bfloat16, 1e-2),
    "operator with top-k": _operator(pooling=TopK(3)),
    "operator with softmax": _operator(pooling=Softmax(0.5)),
    "operator with log-sum-exp": _operator(pooling=LogSumExp(0.5)),
    "different kinds": _different_kinds,
}


# What each of the processes runs: they have a GPU each, or none.
CASES = GPU_CASES if dist.is_initialized() and dist.get_backend() == "nccl" else CPU_CASES


@pytest.mark.process
@pytest.mark.parametrize("outcomes", [pytest.param([2], marks=pytest.mark.smoke), [4]], indirect=True)
@pytest.mark.parametrize("case", CPU_CASES)
def test_gathered(outcomes, case):
    assert set(outcomes(case)) == {"passed"}, outcomes(case)


@pytest.mark.cuda
@pytest.mark.parametrize("outcomes", [[torch.cuda.device_count(), "nccl"]], indirect=True)
@pytest.mark.parametrize("case", GPU_CASES)
def test_gathered_on_gpus(outcomes, case):
    assert set(outcomes(case)) == {"passed"}, outcomes(case)
