"""What the tests of kernels on a GPU share: batches, a guard against waiting, and CUDA graphs."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from pylate_fastmaxsim import TokenBatch
from tests.support import ragged_batches

DEVICE = "cuda"
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def ragged(
    generator: torch.Generator,
    count: int,
    longest: int,
    dim: int,
    dtype: torch.dtype,
    keep: float | None = None,
    shortest: int = 1,
    gap: int = 0,
) -> TokenBatch:
    """Normalised sequences of random lengths in shuffled order; a share ``keep`` of the tokens counts."""
    lengths = torch.randint(shortest, longest + 1, (count,), generator=generator)
    lengths[0] = longest
    order = torch.randperm(count, generator=generator)
    starts = torch.empty_like(lengths)
    ends = (lengths[order] + gap).cumsum(0)
    starts[order] = ends - lengths[order]
    values = torch.randn(int(ends[-1]), dim, generator=generator)
    values = (torch.nn.functional.normalize(values, dim=-1) if dim > 1 else values).to(dtype)
    mask = None if keep is None else (torch.rand(len(values), generator=generator) < keep).to(DEVICE)
    return TokenBatch(values.to(DEVICE), starts.to(DEVICE), lengths.to(DEVICE), longest, mask, gapless=gap == 0)


def random_problem(draw: random.Random, seed: int) -> tuple[TokenBatch, TokenBatch, torch.Tensor | None]:
    """Queries, documents and perhaps candidates of random sizes, lengths, masks and dtype."""
    generator = torch.Generator().manual_seed(seed)
    dim, dtype = draw.choice((16, 96, 128, 160)), draw.choice(DTYPES)

    def lengths(count, longest):
        return [draw.choice((0, 1, longest, draw.randint(0, longest))) for _ in range(count)]

    queries, documents = (
        ragged_batches.ragged(generator, lengths(count, longest), dim, dtype, False, draw.random() < 0.5)
        for count, longest in (
            (draw.choice((1, 5, 17)), draw.choice((1, 32, 140))),
            (draw.choice((1, 9, 40)), draw.choice((1, 63, 65, 700))),
        )
    )
    queries, documents = (
        TokenBatch(
            (batch.values / dim**0.5).to(DEVICE), batch.starts.to(DEVICE), batch.lengths.to(DEVICE), batch.max_length,
            None if batch.keep is None else batch.keep.to(DEVICE),
        )
        for batch in (queries, documents)
    )  # fmt: skip
    candidates = None
    if draw.random() < 0.5:
        candidates = torch.randint(len(documents), (len(queries), 6), generator=generator).to(DEVICE)
    return queries, documents, candidates


@contextmanager
def no_waiting() -> Iterator[None]:
    """Whatever waits for the GPU raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def captured(run: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A CUDA graph of ``run``, and the tensors that a replay fills."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()
    return graph, results
