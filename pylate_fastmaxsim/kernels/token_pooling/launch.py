"""Token pooling on CUDA: launches the Triton kernels. Never waits for the device."""

import torch
from torch import Tensor

from pylate_fastmaxsim.kernels.primitives.live_rows import live_tokens_of
from pylate_fastmaxsim.kernels.runtime.arch import architecture, cdiv, next_power_of_2
from pylate_fastmaxsim.kernels.runtime.cached_launch import RELEASE
from pylate_fastmaxsim.kernels.runtime.tensors import on_device_of
from pylate_fastmaxsim.kernels.token_pooling.cut import cut_kernel
from pylate_fastmaxsim.kernels.token_pooling.linkage import distances_kernel, linkage_kernel
from pylate_fastmaxsim.kernels.token_pooling.means import means_kernel

# For documents of up to so many tokens: clusters that the program of a document looks at at once, and its warps. On sm_120
# 512 clusters of 1 to 4 warps spill registers.
LINKAGE = {256: (256, 1), 512: (512, 2), None: (1024, 4)}
_LINKAGE_120 = LINKAGE | {512: (512, 8)}
# Memory for distances. Documents whose distances fit in it are clustered at a time, and a single one in any case.
DISTANCES_BYTES = 2 << 30
# Triton multiplies matrices of float64 since then.
_HAS_DOT = RELEASE >= (3, 4)


def clusters(
    values: Tensor, starts: Tensor, lengths: Tensor, keep: Tensor | None,
    live: Tensor, to_pool: Tensor, limits: Tensor, new_starts: Tensor, max_to_pool: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Row of the result for each row of ``values``, -1 for none, and how many clusters each document has."""
    tokens, documents = len(values), len(starts)
    rows = torch.full((tokens,), -1, dtype=torch.int64, device=values.device)
    counts = torch.zeros_like(starts)
    if 0 in (tokens, documents):
        return rows, counts
    values = values.contiguous()
    with on_device_of(values):
        live_tokens, _ = live_tokens_of(starts, lengths, keep)
        into, steps = torch.empty((2, tokens), dtype=torch.int32, device=values.device)
        heights = torch.empty(tokens, dtype=torch.float64, device=values.device)
        if max_to_pool > 1:
            _link(values, live_tokens, starts, live, to_pool, limits, into, heights, steps, min(max_to_pool, tokens))
        scratch = torch.empty((10, tokens), dtype=torch.int32, device=values.device)
        cut_kernel[(documents,)](
            live_tokens, starts, live, to_pool, limits, new_starts, into, heights, steps, scratch, rows, counts, tokens,
            BLOCK=32, num_warps=1,
        )  # fmt: skip
    return rows, counts


def _link(
    values: Tensor, live_tokens: Tensor | None, starts: Tensor, live: Tensor, to_pool: Tensor, limits: Tensor,
    into: Tensor, heights: Tensor, steps: Tensor, longest: int,
) -> None:  # fmt: skip
    (tokens, dim), documents, device = values.shape, len(starts), values.device
    # Triton 3.6 multiplies no matrices of float64 that come from 16 bits.
    values = values.float()
    to_pool = to_pool.where(limits < to_pool, 0)
    # The longest first. A wave takes those that begin in `share` distances, behind which the last one has room to end.
    sorted_lengths, order = to_pool.sort(descending=True)
    rooms = sorted_lengths.square()
    rooms = rooms.cumsum(0) - rooms
    most = min(tokens, documents * longest) * longest
    room = max(DISTANCES_BYTES // 8, 2 * longest**2)
    room, share = (most, most) if most <= room else (room, room - longest**2)
    distances = torch.empty(room, dtype=torch.float64, device=device)
    sizes, chains = torch.empty((2, tokens), dtype=torch.int32, device=device)
    table = _LINKAGE_120 if architecture(device) == 120 else LINKAGE
    block, num_warps = next(of for limit, of in table.items() if limit is None or longest <= limit)
    # How many waves there are is known on the device only; the last of those that there may be find nothing to do.
    for wave in range(cdiv(most, share)):
        distances_kernel[(documents, 4)](
            values, live_tokens, starts, live, to_pool, order, rooms, distances, wave, share,
            DIM=dim, HAS_DOT=_HAS_DOT, TILE=32, BLOCK_K=32 if _HAS_DOT else 2, num_warps=4,
        )  # fmt: skip
        # Without fused multiply-adds heights are those of SciPy to the last bit.
        linkage_kernel[(documents,)](
            starts, to_pool, order, rooms, distances, sizes, chains, into, heights, steps, wave, share,
            BLOCK=block, num_warps=num_warps, enable_fp_fusion=False,
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
