"""The k largest scores of each query, repeatably: of equal scores the earlier document comes first."""

import torch
from torch import Tensor


def merge(best: Tensor, positions: Tensor, scores: Tensor, first: int, k: int) -> tuple[Tensor, Tensor]:
    """The ``k`` best scores and positions of those so far and of new scores, the first of which is at ``first``."""
    new = torch.arange(first, first + scores.shape[1], device=scores.device).expand_as(scores)
    scores, positions = torch.cat([best, scores], dim=1), torch.cat([positions, new], dim=1)
    order = largest(scores, min(k, scores.shape[1]))
    return scores.gather(1, order), positions.gather(1, order)


def largest(scores: Tensor, k: int) -> Tensor:
    """Columns of the ``k`` largest scores of each row, the largest first, of equal ones the first column first."""
    if scores.dtype != torch.float32:
        return scores.argsort(dim=1, descending=True, stable=True)[:, :k]
    # topk takes a fraction of the time of a stable sort, but picks any of equal values. So each score gets a key that no
    # other has: its bits, which as integers are in the order of scores once those of negative numbers are inverted, and
    # below them the column, counted from the end.
    bits = (scores + 0.0).view(torch.int32)  # -0.0 becomes 0.0
    bits = torch.where(scores.isnan(), torch.iinfo(torch.int32).max, bits ^ (bits >> 31 & 0x7FFFFFFF))
    last = scores.shape[1] - 1
    keys = (bits.long() << 32) + (last - torch.arange(last + 1, device=scores.device))
    return last - (keys.topk(k, dim=1).values & 0xFFFFFFFF)
