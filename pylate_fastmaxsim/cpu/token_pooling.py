"""Ward's clusters of the tokens of each document with SciPy, document after document, and means of rows.

SciPy holds Python's lock while it clusters, so that threads would only take turns.
"""

import numpy as np
import torch
from scipy.cluster import hierarchy
from scipy.spatial.distance import squareform
from torch import SymInt, Tensor

from pylate_fastmaxsim._dtypes import sum_dtype
from pylate_fastmaxsim.cpu.live_tokens import live_tokens


def clusters(
    values: Tensor, starts: Tensor, lengths: Tensor, keep: Tensor | None,
    live: Tensor, to_pool: Tensor, limits: Tensor, new_starts: Tensor, max_to_pool: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Row of the result for each row of ``values``, -1 for none, and how many clusters each document has."""
    numbers = values.detach().cpu().double()
    rows = torch.full((len(values),), -1, dtype=torch.int64)
    counts = []
    documents = live_tokens(starts, lengths, keep).row.cpu().split(live.tolist())
    of_each = zip(documents, to_pool.tolist(), limits.tolist(), new_starts.tolist(), strict=True)
    for tokens, pooled, limit, start in of_each:
        kept = len(tokens) - pooled
        labels = ward_labels(numbers[tokens[kept:]], limit)
        rows[tokens] = start + torch.cat([torch.arange(kept), kept + labels])
        counts.append(int(labels.max()) + 1 if pooled else 0)
    return rows.to(values.device), torch.tensor(counts, dtype=torch.int64, device=values.device)


def ward_labels(vectors: Tensor, limit: int) -> Tensor:
    """The cluster of each of the vectors ``[n, d]``, float64, of at most ``limit``, in SciPy's order from 0."""
    if limit == len(vectors):
        return torch.arange(limit)
    distances = (1 - vectors @ vectors.t()).nan_to_num(2.0, 2.0, 0.0).clamp(0, 2)
    merges = hierarchy.linkage(squareform(distances.numpy(), checks=False), method="ward")
    labels = hierarchy.fcluster(merges, t=limit, criterion="maxclust")
    return torch.from_numpy(labels.astype(np.int64)) - 1


def means(values: Tensor, rows: Tensor, count: int | SymInt) -> tuple[Tensor, Tensor]:
    """Means of the ``values`` that go to each of ``count`` rows, ``[count, d]``, 0 without one, and how many do."""
    used = rows >= 0
    sums = values.new_zeros((count, values.shape[1]), dtype=sum_dtype(values.dtype))
    sums.index_add_(0, rows[used], values[used].to(sums.dtype))
    sizes = torch.bincount(rows[used], minlength=count)
    return sums / sizes.clamp(min=1)[:, None], sizes
