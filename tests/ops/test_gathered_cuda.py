"""Documents gathered over the GPUs of one host, each with a process of its own. NCCL."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from pylate_fastmaxsim import TokenBatch, maxsim
from pylate_fastmaxsim.ops.gathered import gather_documents
from tests.support.ranks import run_cases

DIM = 128


def _documents(rank: int, documents: int = 128, longest: int = 300) -> TokenBatch:
    generator = torch.Generator("cuda").manual_seed(rank)
    # The ranks differ most in what they have to send.
    lengths = (torch.rand(documents, device="cuda", generator=generator) * longest / (1 + rank)).long()
    values = torch.randn(int(lengths.sum()), DIM, device="cuda", generator=generator).to(torch.bfloat16)
    return TokenBatch.from_packed(values, torch.nn.functional.pad(lengths.cumsum(0), (1, 0)))


def _gradients(folder: str) -> None:
    """Those of a rank's documents are of the queries of all ranks."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator("cuda").manual_seed(99)
    queries = torch.randn(ranks, 64, 32, DIM, device="cuda", generator=generator).to(torch.bfloat16)
    documents = _documents(rank)
    documents.values.requires_grad_()
    maxsim(queries[rank], gather_documents(documents)[0]).sum().backward()
    alone = documents.with_values(documents.values.detach().float().requires_grad_())
    maxsim(queries.flatten(0, 1).float(), alone).sum().backward()
    error = (documents.values.grad.float() - alone.values.grad).norm() / alone.values.grad.norm()
    assert error < 1e-2


def _waits_for_no_computation(folder: str) -> None:
    """Where the documents of other ranks are is known before the device has done what it was given to do."""
    documents = _documents(dist.get_rank())
    expected = _layout(gather_documents(documents)[0])  # and makes the connections
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda._sleep(4 * 10**9)  # cycles: some seconds
    slept = torch.cuda.Event()
    slept.record()
    gathered, _ = gather_documents(documents)
    assert not slept.query()
    # Of one rank there is no mask.
    torch.testing.assert_close(_layout(gathered), expected, rtol=0, atol=0)


def _layout(documents: TokenBatch) -> tuple:
    """All but the vectors, whose memory the next call takes: allocating more may wait for the device."""
    return documents.max_length, documents.starts, documents.lengths, documents.keep


CASES = {"gradients": _gradients, "waits for no computation": _waits_for_no_computation}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[str]]:
    return run_cases(__name__, torch.cuda.device_count(), tmp_path_factory.mktemp("gathered"), "nccl")


@pytest.mark.cuda
@pytest.mark.parametrize("case", CASES)
def test_gathered_on_gpus(outcomes, case):
    for rank, outcome in enumerate(outcomes(case)):
        assert outcome == "passed", f"rank {rank}: {outcome}"
