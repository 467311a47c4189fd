from itertools import product

import numpy as np
import pytest
from scipy.stats import ttest_rel

from pylate_fastmaxsim.recipes.search.significance import compare, fisher, holm, student


def test_student_is_the_paired_t_test():
    left, right = np.random.default_rng(0).random((2, 40))
    assert student(right - left) == pytest.approx(ttest_rel(right, left).pvalue, rel=1e-12)
    assert student(np.zeros(5)) == student(np.array([0.3])) == 1.0
    assert student(np.full(5, 0.25)) == 0.0


@pytest.mark.parametrize("shift", [0.0, 0.15, 0.3])
def test_fisher_is_the_share_of_signs_with_a_mean_as_far_from_0(shift, monkeypatch):
    # Steps of a quarter: many sums are equal, and equal ones count.
    differences = np.round(4 * (np.random.default_rng(3).random(12) - 0.5 + shift)) / 4 * 0.1
    sums = np.array(list(product([-1, 1], repeat=12))) @ differences
    exact = (np.abs(sums) >= abs(differences.sum()) - 1e-12).mean()
    assert fisher(differences) == pytest.approx(exact, abs=0.02)
    monkeypatch.setattr("pylate_fastmaxsim.recipes.search.significance.SIGNS_AT_ONCE", 12 * 700)
    assert fisher(differences) == pytest.approx(exact, abs=0.02)
    assert fisher(np.zeros(5)) == 1.0


def test_pairs_are_corrected_within_a_metric():
    random, metrics = np.random.default_rng(1), ("ndcg@10", "mrr@10")

    def drawn(shift: float) -> dict[str, float]:
        return {f"q{query}": float(value) for query, value in enumerate(shift + random.random(30))}

    shifts = {"a": 0.0, "b": 0.1, "c": 0.5}
    scores = {model: {metric: drawn(shift) for metric in metrics} for model, shift in shifts.items()}
    scores["b"]["mrr@10"]["q3"] = scores["a"]["mrr@10"]["q3"]
    rows = compare(scores, "student")
    expected = [(*pair, metric) for metric in metrics for pair in ("ab", "ac", "bc")]
    assert [(*row["models"], row["metric"]) for row in rows] == expected
    for row in rows:
        left, right = (np.array(list(scores[model][row["metric"]].values())) for model in row["models"])
        assert row["difference"] == pytest.approx(right.mean() - left.mean())
        assert (row["better"], row["worse"]) == ((right > left).sum(), (right < left).sum())
    assert rows[3]["equal"] == 1 and rows[0]["equal"] == 0
    for metric in (rows[:3], rows[3:]):
        smallest = min(metric, key=lambda row: row["p"])
        assert smallest["corrected_p"] == pytest.approx(3 * smallest["p"])
    assert holm([0.04, 0.03, 0.03]) == pytest.approx([0.09] * 3)  # no p is below that of a smaller one
    assert holm([0.9, 0.6]) == [1.0, 1.0]
