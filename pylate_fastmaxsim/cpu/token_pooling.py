"""Ward's clusters of the tokens of each document with SciPy, document after document, and means of rows.

SciPy holds Python's lock while it clusters, so that threads would only take turns.
"""

import numpy as np
import torch
from scipy.cluster import hierarchy
from scipy.spatial.distance import squareform
from torch import Tensor

from pylate_fastmaxsim._dtypes import sum_dtype
from pylate_fastmaxsim.cpu.live_tokens import live_tokens


def clusters(
    values: Tensor, starts: Tensor, lengths: Tensor, keep: Tensor | None,
    max_length: int, factor: float, count: int, protected: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Row of the result for each row of ``values``, -1 for none, and starts and lengths of the result."""
    live = live_tokens(starts, lengths, keep)
    to_pool, wanted = numbers_of_clusters(live.count, factor, count, protected)
    new_starts, new_lengths = (live.count - to_pool + wanted).cpu(), (live.count - to_pool).tolist()
    new_starts = new_starts.cumsum(0) - new_starts
    numbers = values.detach().cpu().double()
    rows = torch.full((len(values),), -1, dtype=torch.int64)
    documents = zip(live.row.cpu().split(live.count.tolist()), wanted.tolist(), new_starts.tolist(), strict=True)
    for document, (of_document, limit, start) in enumerate(documents):
        kept = new_lengths[document]
        labels = ward_labels(numbers[of_document[kept:]], limit)
        rows[of_document[:kept]] = torch.arange(start, start + kept)
        rows[of_document[kept:]] = labels + start + kept
        new_lengths[document] += int(labels.max()) + 1 if len(labels) else 0
    return rows.to(values.device), new_starts.to(values.device), torch.tensor(new_lengths, device=values.device)


def numbers_of_clusters(live: Tensor, factor: float, count: int, protected: int) -> tuple[Tensor, Tensor]:
    """How many tokens of each document are pooled, and into how many clusters at most."""
    to_pool = (live - protected).clamp(min=0)
    # As Python's `//`, which the hosts use, also for a factor that is no integer.
    wanted = (
        torch.div(to_pool.double(), factor, rounding_mode="floor").long() if factor else torch.full_like(live, count)
    )
    return to_pool, torch.minimum(wanted.clamp(min=1), to_pool)


def ward_labels(vectors: Tensor, limit: int) -> Tensor:
    """The cluster of each of the vectors ``[n, d]``, float64, of at most ``limit``, in SciPy's order from 0."""
    if limit == len(vectors):
        return torch.arange(limit)
    distances = (1 - vectors @ vectors.t()).nan_to_num(2.0, 2.0, 0.0).clamp(0, 2)
    merges = hierarchy.linkage(squareform(distances.numpy(), checks=False), method="ward")
    labels = hierarchy.fcluster(merges, t=limit, criterion="maxclust")
    return torch.from_numpy(labels.astype(np.int64)) - 1


def means(values: Tensor, rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Means of the ``values`` that go to each of ``count`` rows, ``[count, d]``, 0 without one, and how many do."""
    used = rows >= 0
    sums = values.new_zeros((count, values.shape[1]), dtype=sum_dtype(values.dtype))
    sums.index_add_(0, rows[used], values[used].to(sums.dtype))
    sizes = torch.bincount(rows[used], minlength=count)
    return sums / sizes.clamp(min=1)[:, None], sizes
