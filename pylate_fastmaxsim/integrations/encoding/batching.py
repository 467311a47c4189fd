"""Divide documents by length into padded groups or packed mini-batches. Runs on the host, on lists of ints."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

# Tokens that a GPU encodes while the host launches a call and its backward. Measured for 12 layers of 768 in bf16 on an
# H100: 40 ms to launch, 5 us a token.
TOKENS_PER_CALL = 2**13


def number_of_groups(lengths: Sequence[int], on_gpu: bool) -> int:
    """Into how many groups to divide documents of these lengths.

    More groups leave less padding, and each is one more call. On a CPU a call costs little. On a GPU the best number
    minimizes the larger of two times: launching the calls, and encoding their tokens.

    Examples
    --------
    >>> [number_of_groups([9] * n, on_gpu=False) for n in (1, 8, 32, 64, 1024)]
    [1, 2, 6, 8, 8]
    >>> [number_of_groups([100] * (n // 2) + [300] * (n // 2), on_gpu=True) for n in (8, 64, 1024)]
    [1, 2, 2]
    """
    most = min(len(lengths), 8, max(2, len(lengths) // 5))
    if not on_gpu:
        return most
    _, _, size = _sizes(lengths)
    number, shortest = 1, float("inf")
    best = size[:, 0]
    for count in range(1, min(most, len(size) - 1) + 1):
        launched, encoded = count * TOKENS_PER_CALL, best[-1]
        if max(launched, encoded) < shortest:
            number, shortest = count, max(launched, encoded)
        if launched >= encoded:
            break
        best = (best[:-1] + size).min(axis=1)
    return number


def group_by_length(lengths: Sequence[int], groups: int) -> list[list[int]]:
    """Divide documents into exactly ``groups`` groups of similar length, with the least padding.

    Groups are intervals of the sorted lengths. Dynamic programming over the distinct lengths finds the best boundaries.

    Parameters
    ----------
    lengths
        Length of each document.
    groups
        From 1 to ``len(lengths)``.

    Returns
    -------
    list of list of int
        Indices of the documents of each group, none empty, by ascending length.

    Examples
    --------
    >>> group_by_length([9, 2, 30, 3, 8], groups=3)
    [[1, 3], [4, 0], [2]]
    """
    order, ends, size = _sizes(lengths)
    best, previous = size[:, 0], []
    for _ in range(min(groups, len(size) - 1) - 1):
        total = best[:-1] + size
        previous.append(total.argmin(axis=1))
        best = total.min(axis=1)
    boundaries = [len(size) - 1]
    for choice in reversed(previous):
        boundaries.append(int(choice[boundaries[-1]]))
    parts = np.split(order, ends[boundaries[:0:-1]])
    return split_until([part.tolist() for part in parts], groups)


def _sizes(lengths: Sequence[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Documents sorted by length, the number of documents up to each distinct length, and the sizes of groups.

    ``size[j, i]`` are the tokens, with padding, of a group of the distinct lengths ``i`` to ``j - 1``. If the best
    division of the first ``j`` lengths has ``best[j]`` tokens, the best with one group more has the minimum over ``i``
    of ``best[i] + size[j, i]``.
    """
    order = np.argsort(np.asarray(lengths), kind="stable")
    distinct, counts = np.unique(np.asarray(lengths)[order], return_counts=True)
    ends = np.concatenate([[0], np.cumsum(counts)])
    size = (ends[1:, None] - ends[None, :-1]) * distinct[:, None].astype(np.float64)
    size = np.concatenate([np.full((1, len(distinct)), np.inf), np.where(size > 0, size, np.inf)])
    return order, ends, size


def fill_in_order(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Divide documents, in their order, into mini-batches of at most ``budget`` tokens.

    A document longer than the budget is a mini-batch of its own.

    Examples
    --------
    >>> fill_in_order([5, 4, 3, 9, 1], budget=10)
    [[0, 1], [2], [3, 4]]
    """
    parts: list[list[int]] = []
    filled = budget
    for index, length in enumerate(lengths):
        if not parts or filled + length > budget:
            parts.append([])
            filled = 0
        parts[-1].append(index)
        filled += length
    return parts


def fill_by_length(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Divide documents of similar length into mini-batches of at most ``budget`` tokens, padding included.

    A document longer than the budget is a mini-batch of its own.

    Examples
    --------
    >>> fill_by_length([5, 4, 3, 9, 1], budget=10)
    [[3], [0, 1], [2, 4]]
    """
    parts: list[list[int]] = []
    longest = 0
    for index in np.argsort(-np.asarray(lengths), kind="stable").tolist():
        if not parts or (len(parts[-1]) + 1) * longest > budget:
            parts.append([])
            longest = lengths[index]
        parts[-1].append(index)
    return parts


def split_until(parts: list[list[int]], count: int) -> list[list[int]]:
    """Halve the part with the most documents until there are ``count`` parts.

    Raises
    ------
    ValueError
        There are fewer documents than ``count``.

    Examples
    --------
    >>> split_until([[0, 1, 2], [3]], count=3)
    [[0], [1, 2], [3]]
    """
    parts = list(parts)
    while len(parts) < count:
        largest = max(range(len(parts)), key=lambda part: len(parts[part]))
        part = parts[largest]
        if len(part) < 2:
            raise ValueError(f"split_until: cannot divide {sum(map(len, parts))} documents into {count} parts.")
        parts[largest : largest + 1] = [part[: len(part) // 2], part[len(part) // 2 :]]
    return parts
