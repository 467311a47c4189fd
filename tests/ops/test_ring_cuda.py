"""Documents that go round the GPUs of one host, each with a process of its own, against gathered ones. NCCL."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from models import features, load_model, sentences
from pylate import losses
from ranks import run_cases
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import pylate_fastmaxsim
from pylate_fastmaxsim import TokenBatch, _winners, maxsim
from pylate_fastmaxsim.ops.distributed import ring as distributed_ring
from pylate_fastmaxsim.ops.distributed.gather import gather_documents
from pylate_fastmaxsim.ops.distributed.layout import describe
from pylate_fastmaxsim.ops.distributed.ring import ring_maxsim

DIM = 128


def _error(ours: Tensor, gold: Tensor) -> float:
    return float((ours.double() - gold.double()).norm() / gold.double().norm())


def _inputs(dtype: torch.dtype, queries: int, documents: int, longest: int) -> tuple[Tensor, TokenBatch, Tensor]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator("cuda").manual_seed(rank)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", generator=generator)

    # The ranks differ most in what they have to send.
    lengths = (torch.rand(documents, device="cuda", generator=generator) * longest / (1 + rank)).long()
    batch = TokenBatch.from_packed(
        random(int(lengths.sum()), DIM).to(dtype), torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    )
    return random(queries, 32, DIM).to(dtype), batch, random(queries, ranks * documents).exp()


def _operator(dtype: torch.dtype, tolerance: float, **limits: int) -> Callable[[str], None]:
    def run(folder: str) -> None:
        queries, documents, weights = _inputs(dtype, queries=64, documents=128, longest=300)

        def step(score: Callable[[Tensor, TokenBatch], Tensor]) -> tuple[Tensor, Tensor, Tensor]:
            leaves = queries.detach().requires_grad_(), documents.values.detach().requires_grad_()
            scores = score(leaves[0], documents.with_values(leaves[1]))
            scores.backward(weights)
            return scores.detach(), leaves[0].grad, leaves[1].grad

        gathered = step(lambda q, d: maxsim(q, gather_documents(d)[0]))
        before = distributed_ring.KEPT_STATE_BYTES, _winners._AT_ONCE_BYTES
        distributed_ring.KEPT_STATE_BYTES = limits.get("kept", before[0])
        _winners._AT_ONCE_BYTES = limits.get("at_once", before[1])
        try:
            rounds = [step(ring_maxsim) for _ in range(10)]
        finally:
            distributed_ring.KEPT_STATE_BYTES, _winners._AT_ONCE_BYTES = before
        for ours, gold in zip(rounds[0], gathered, strict=True):
            assert ours.dtype == gold.dtype
            assert _error(ours, gold) <= tolerance
        # A transfer that overtakes the work on its buffer would show here.
        for other in rounds[1:]:
            assert all(torch.equal(one, two) for one, two in zip(rounds[0], other, strict=True))

    return run


def _loss(loss_class, **options) -> Callable[[str], None]:
    def run(folder: str) -> None:
        core = load_model(f"{folder}/modernbert", device=f"cuda:{dist.get_rank()}")
        rank = dist.get_rank()
        texts = [sentences(16, longest=8, seed=rank), *(sentences(16, seed=10 * c + rank) for c in (1, 2))]
        batch = features(core, *texts)
        loss_function = loss_class(DistributedDataParallel(core), gather_across_devices=True, **options)

        def step() -> tuple[Tensor, Tensor]:
            core.zero_grad()
            with torch.autocast("cuda", torch.bfloat16):
                loss = loss_function([dict(column) for column in batch])
            loss.backward()
            return loss.detach(), torch.cat([weight.grad.flatten() for weight in core.parameters()])

        with pylate_fastmaxsim.enabled():
            gathered = step()
            pylate_fastmaxsim.enable(ring=True)
            in_ring = step()
        assert _error(in_ring[0], gathered[0]) < 1e-5
        assert _error(in_ring[1], gathered[1]) < 1e-2

    return run


def _memory(folder: str) -> None:
    """The ring takes at most the memory of gathering, and from 4 ranks on much less."""
    ranks = dist.get_world_size()
    queries, documents, _ = _inputs(torch.bfloat16, queries=8, documents=512, longest=300)
    documents.values.requires_grad_()

    def peak(score: Callable[[], Tensor]) -> int:
        score().sum().backward()
        documents.values.grad = None
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        score().sum().backward()
        documents.values.grad = None
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    largest = torch.tensor(documents.values.numel(), device="cuda")
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    # Two shards in bfloat16, two gradients in float32, what is added to one of these, the result, and small things.
    assert peak(lambda: ring_maxsim(queries, documents)) < 2 * int(largest) * (2 + 4 + 2) + 2**26
    gathered = peak(lambda: maxsim(queries, gather_documents(documents)[0]))
    assert gathered > ranks * int(largest) * 2


def _waits_for_no_computation(folder: str) -> None:
    """Where the documents of other ranks are is known before the device has done what it was given to do."""
    _, documents, _ = _inputs(torch.bfloat16, queries=8, documents=128, longest=300)
    expected = describe(documents, None)  # and makes the connections
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda._sleep(4 * 10**9)  # cycles: some seconds
    slept = torch.cuda.Event()
    slept.record()
    shards = describe(documents, None)
    assert not slept.query()
    assert (shards.rows, shards.max_lengths) == (expected.rows, expected.max_lengths)
    assert torch.equal(shards.starts, expected.starts)
    assert torch.equal(shards.keep, expected.keep)


CASES = {
    "bfloat16": _operator(torch.bfloat16, 1e-2),
    "float32": _operator(torch.float32, 1e-5),
    "no winners kept": _operator(torch.bfloat16, 1e-2, kept=0),
    "chunks": _operator(torch.bfloat16, 1e-2, kept=0, at_once=2**17),
    "contrastive": _loss(losses.Contrastive),
    "cached": _loss(losses.CachedContrastive, mini_batch_size=4),
    "memory": _memory,
    "waits for no computation": _waits_for_no_computation,
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[str]]:
    return run_cases(__name__, torch.cuda.device_count(), tmp_path_factory.mktemp("ring"), "nccl")


@pytest.mark.cuda
@pytest.mark.parametrize("case", CASES)
def test_ring_of_gpus(outcomes, case):
    for rank, outcome in enumerate(outcomes(case)):
        assert outcome == "passed", f"rank {rank}: {outcome}"
