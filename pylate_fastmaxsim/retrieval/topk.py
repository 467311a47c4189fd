"""The k largest scores of each query, repeatably: of equal scores the earlier document comes first."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

# Columns that are sorted, in one call where keys take a dozen.
FEW = 64

# Keys of a group; with fewer, grouping saves nothing.
LEAST_GROUP = 3


def merge(best: Tensor, positions: Tensor, scores: Tensor, first: int, k: int) -> tuple[Tensor, Tensor]:
    """The ``k`` best scores and positions of those so far and of scores of documents from ``first`` on, behind those."""
    order = largest(scores, min(k, scores.shape[1]))
    scores, found = scores.gather(1, order), order + first
    if best.shape[1] == 0:
        return scores, found
    scores, positions = torch.cat([best, scores], dim=1), torch.cat([positions, found], dim=1)
    order = largest(scores, min(k, scores.shape[1]))
    return scores.gather(1, order), positions.gather(1, order)


def merge_results(results: Sequence[tuple[Tensor, Tensor]], k: int) -> tuple[Tensor, Tensor]:
    """The ``k`` best of several results of sparse search, each of documents behind those of the one before."""
    if len(results) == 1:
        return results[0]
    scores, positions = (torch.cat(parts, dim=1) for parts in zip(*results, strict=True))
    # A score may be 0 as well, and must come before what fills up.
    scores = scores.masked_fill(positions < 0, -1)
    order = largest(scores, min(k, scores.shape[1]))
    return scores.gather(1, order).clamp_(min=0), positions.gather(1, order)


def largest(scores: Tensor, k: int) -> Tensor:
    """Columns of the ``k`` largest scores of each row, the largest first, of equal ones the first column first."""
    if scores.dtype != torch.float32 or scores.shape[1] <= FEW:
        return scores.argsort(dim=1, descending=True, stable=True)[:, :k]
    # topk takes a fraction of the time of a stable sort, but picks any of equal values. So each score gets a key that no
    # other has: its bits, which as integers are in the order of scores once those of negative numbers are inverted, and
    # below them the column, counted from the end.
    bits = (scores + 0.0).view(torch.int32)  # -0.0 becomes 0.0
    bits.bitwise_xor_((bits >> 31).bitwise_and_(0x7FFFFFFF))
    bits.masked_fill_(scores.isnan(), torch.iinfo(torch.int32).max)
    last = scores.shape[1] - 1
    keys = bits.long().bitwise_left_shift_(32).add_(last - torch.arange(last + 1, device=scores.device))
    return last - (_largest_keys(keys, k) & 0xFFFFFFFF)


def _largest_keys(keys: Tensor, k: int) -> Tensor:
    """The ``k`` largest of each row, none of which are equal."""
    # They lie in the k groups of columns with the largest maxima; sqrt(n * k) groups leave the fewest keys to look at.
    height = math.isqrt(keys.shape[1] // max(k, 1))
    if height < LEAST_GROUP:
        return keys.topk(k, dim=1).values
    grouped, rest = keys.tensor_split([keys.shape[1] // height * height], dim=1)
    grouped = grouped.unflatten(1, (height, -1))
    groups = grouped.amax(dim=1).topk(k, dim=1).indices
    inside = grouped.gather(2, groups[:, None].expand(-1, height, -1)).flatten(1)
    return torch.cat([inside, rest], dim=1).topk(k, dim=1).values
