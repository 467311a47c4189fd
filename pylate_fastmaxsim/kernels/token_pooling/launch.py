"""Token pooling on CUDA: launches the Triton kernels. Never waits for the device."""

from typing import NamedTuple

import torch
from torch import Tensor

from pylate_fastmaxsim.kernels.primitives.live_rows import live_tokens_of
from pylate_fastmaxsim.kernels.runtime.arch import cdiv, next_power_of_2
from pylate_fastmaxsim.kernels.runtime.tensors import on_device_of
from pylate_fastmaxsim.kernels.token_pooling.cut import cut_kernel
from pylate_fastmaxsim.kernels.token_pooling.linkage import linkage_kernel
from pylate_fastmaxsim.kernels.token_pooling.means import means_kernel


class LinkageSizes(NamedTuple):
    """A program clusters one document at a time, `block` clusters of it at once; distances come in squares of `tile`.

    `programs` at once on a multiprocessor, unless the distances of all would take more than `scratch_bytes`.
    """

    tile: int = 32
    block: int = 256
    num_warps: int = 2
    programs: int = 8
    scratch_bytes: int = 2 << 30


SIZES = LinkageSizes()
# Numbers of a vector that are multiplied without a branch.
_UNROLL = 4


def clusters(
    values: Tensor, starts: Tensor, lengths: Tensor, keep: Tensor | None,
    live: Tensor, to_pool: Tensor, limits: Tensor, new_starts: Tensor, max_to_pool: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Row of the result for each row of ``values``, -1 for none, and how many clusters each document has."""
    (tokens, dim), documents = values.shape, len(starts)
    rows = torch.full((tokens,), -1, dtype=torch.int64, device=values.device)
    counts = torch.zeros_like(starts)
    if 0 in (tokens, documents):
        return rows, counts
    with on_device_of(values):
        live_tokens, _ = live_tokens_of(starts, lengths, keep)
        into, steps = torch.empty((2, tokens), dtype=torch.int32, device=values.device)
        heights = torch.empty(tokens, dtype=torch.float64, device=values.device)
        if max_to_pool > 1:
            _link(values, live_tokens, starts, live, to_pool, limits, into, heights, steps, max_to_pool)
        scratch = torch.empty((10, tokens), dtype=torch.int32, device=values.device)
        cut_kernel[(documents,)](
            live_tokens, starts, live, to_pool, limits, new_starts, into, heights, steps, scratch, rows, counts, tokens,
            BLOCK=64, num_warps=1,
        )  # fmt: skip
    return rows, counts


def _link(
    values: Tensor, live_tokens: Tensor | None, starts: Tensor, live: Tensor, to_pool: Tensor, limits: Tensor,
    into: Tensor, heights: Tensor, steps: Tensor, side: int,
) -> None:  # fmt: skip
    (tokens, dim), documents, device = values.shape, len(starts), values.device
    most = SIZES.programs * (torch.cuda.get_device_properties(device).multi_processor_count if values.is_cuda else 1)
    programs = min(documents, most, max(1, SIZES.scratch_bytes // (8 * side * side)))
    padded_dim = cdiv(dim, _UNROLL) * _UNROLL
    vectors = torch.nn.functional.pad(values, (0, padded_dim - dim)).t().contiguous()
    # The longest first, so that programs end at about the same time.
    order = to_pool.argsort(descending=True)
    distances = torch.empty(programs * side * side, dtype=torch.float64, device=device)
    sizes, chains = torch.empty((2, programs * side), dtype=torch.int32, device=device)
    # No fused multiply-adds but those of distances: heights are those of SciPy to the last bit.
    linkage_kernel[(programs,)](
        vectors, live_tokens, starts, live, to_pool, limits, order, distances, sizes, chains, into, heights, steps,
        documents, programs, side, tokens,
        DIM=padded_dim, TILE=SIZES.tile, UNROLL=_UNROLL, BLOCK=SIZES.block,
        num_warps=SIZES.num_warps, enable_fp_fusion=False,
    )  # fmt: skip


def means(values: Tensor, rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Means of the ``values`` that go to each of ``count`` rows, ``[count, d]`` float32, 0 without one, and how many do."""
    dim = values.shape[1]
    means = values.new_empty((count, dim), dtype=torch.float32)
    # One place more in front, for rows that go nowhere.
    sizes = torch.zeros(count + 1, dtype=torch.int64, device=values.device)
    sizes.scatter_add_(0, rows + 1, torch.ones_like(rows))
    if 0 not in (count, dim):
        block = min(1024, next_power_of_2(dim))
        with on_device_of(values):
            means_kernel[(count, cdiv(dim, block))](
                values.contiguous(), rows.int().argsort(stable=True), sizes.cumsum(0)[:-1], sizes[1:], means,
                DIM=dim, BLOCK=block, num_warps=1,
            )  # fmt: skip
    return means, sizes[1:]
