"""Paired tests over queries: do the metrics of two models differ by more than chance?"""

from collections.abc import Sequence
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Models by name, metrics by name, and the value of each query.
Scores = dict[str, dict[str, dict[str, float]]]

# Of Fisher's randomisation test: the smallest p is one in so many.
FLIPS = 10_000
# Signs that are held at once, 64 MiB of float64.
SIGNS_AT_ONCE = 1 << 23


def compare(scores: Scores, test: str, pairs: Sequence[tuple[str, str]] | None = None) -> list[dict[str, Any]]:
    """Each pair of models by each metric, in the order of the models; ``pairs`` for only these.

    ``scores`` are metrics of each model for the same queries, and ``test`` is one of ``TESTS``.

    Returns
    -------
    For each pair and metric ``models``, ``metric``, ``difference`` (the mean of the second model less that of the first),
    ``p`` and ``corrected_p`` (by Holm's method, over the pairs of one metric), and for how many queries the second model
    is ``better``, ``equal`` and ``worse``.
    """
    first = next(iter(scores.values()))
    rows = []
    for metric, by_query in first.items():
        found = []
        for pair in combinations(scores, 2) if pairs is None else pairs:
            left, right = (np.array([scores[model][metric][query] for query in by_query]) for model in pair)
            differences = right - left
            counts = {"better": differences > 0, "equal": differences == 0, "worse": differences < 0}
            found.append(
                {
                    "models": list(pair),
                    "metric": metric,
                    "difference": float(differences.mean()),
                    "p": TESTS[test](differences),
                    **{name: int(which.sum()) for name, which in counts.items()},
                }
            )
        corrected = holm([row["p"] for row in found])
        rows += [row | {"corrected_p": p} for row, p in zip(found, corrected, strict=True)]
    return rows


def student(differences: NDArray[np.float64]) -> float:
    """Two-sided p of the paired t-test, of the difference of each query; 1 where none differs."""
    if not differences.any() or len(differences) < 2:
        return 1.0
    from scipy.stats import ttest_1samp

    return float(ttest_1samp(differences, 0.0).pvalue)


def fisher(differences: NDArray[np.float64]) -> float:
    """Two-sided p of Fisher's randomisation test: how often random signs make a mean as far from 0, the same each time."""
    random, wanted = np.random.default_rng(0), abs(differences.sum())
    # Sums of the same numbers in another order differ by rounding.
    wanted -= 1e-9 * np.abs(differences).sum()
    at_once = max(1, SIGNS_AT_ONCE // len(differences))
    as_far = 1  # the signs that were found are one of them
    for begin in range(0, FLIPS - 1, at_once):
        signs = random.integers(0, 2, (min(at_once, FLIPS - 1 - begin), len(differences)), dtype=np.int8)
        as_far += int((np.abs((2.0 * signs - 1.0) @ differences) >= wanted).sum())
    return as_far / FLIPS


def holm(p_values: Sequence[float]) -> list[float]:
    """p corrected by Holm's method, so that one of several true null hypotheses is rejected with at most this chance."""
    corrected, largest = list(p_values), 0.0
    for place, number in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - place) * p_values[number]))
        corrected[number] = largest
    return corrected


TESTS = {"student": student, "fisher": fisher}
