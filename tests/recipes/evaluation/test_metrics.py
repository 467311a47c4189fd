import random

import numpy as np
import pytest
from datasets import Dataset

from pylate_fastmaxsim.recipes.data.collection import Collection
from pylate_fastmaxsim.recipes.evaluation.ranking import metrics_by_query, metrics_of

NAMES = ("ndcg@10", "mrr@10", "recall@100")


def defined(name: str, ranked: list[str], grades: dict[str, int]) -> float:
    """A metric as trec_eval has it: a grade below 1 is not relevant and has no gain."""
    depth = int(name.split("@")[1])
    gains = np.array([max(grades.get(document, 0), 0) for document in ranked[:depth]], dtype=float)
    ideal = np.sort([max(grade, 0) for grade in grades.values()])[::-1][:depth].astype(float)
    if not ideal.any() or not gains.any():
        return 0.0
    if name.startswith("ndcg"):
        dcg, best = (float(np.sum(each / np.log2(np.arange(len(each)) + 2))) for each in (gains, ideal))
        return dcg / best
    if name.startswith("mrr"):
        return 1 / (1 + int(np.flatnonzero(gains)[0]))
    return float((gains > 0).sum() / sum(grade > 0 for grade in grades.values()))


def shuffled(draw: random.Random, values: dict) -> dict:
    return dict(draw.sample(list(values.items()), len(values)))


@pytest.mark.e2e  # ranx compiles for seconds
@pytest.mark.parametrize("order", ["same", "random"])
def test_rankings_are_paired_with_the_judgements_of_their_query(order):
    draw = random.Random(0)
    documents = [f"d{number}" for number in range(150)]
    # As numbers in text, which are sorted otherwise than they are counted.
    grades = {str(n): {each: draw.randint(-2, 3) for each in draw.sample(documents, 1 + n)} for n in range(21)}
    found = {query: draw.sample(documents, len(documents) - 5 * int(query)) for query in grades}
    grades |= {"found nothing": {"d1": 1}, "nothing relevant": {"d1": 0, "d2": -1}, "not searched": {"d3": 2}}
    found |= {"found nothing": [], "nothing relevant": ["d1", "d2"], "not judged": ["d1"]}
    expected = {name: {q: defined(name, found.get(q, []), own) for q, own in grades.items()} for name in NAMES}
    if order == "random":
        grades = shuffled(draw, {query: shuffled(draw, own) for query, own in grades.items()})
        found = shuffled(draw, found)
    collection = Collection(Dataset.from_list([]), dict.fromkeys(found, ""), grades)
    # Equal scores: the order of the ranking counts.
    ranking = {query: dict.fromkeys(own, 1.0) for query, own in found.items()}
    measured = metrics_by_query(ranking, collection, NAMES)
    for name in NAMES:
        assert list(measured[name]) == sorted(grades)
        assert measured[name] == pytest.approx(expected[name], abs=1e-12)
        assert len(set(expected[name].values())) > 5  # so that another pairing would be seen
    means = {name: np.mean(list(expected[name].values())) for name in NAMES}
    assert metrics_of(ranking, collection, NAMES) == pytest.approx(means, abs=1e-12)
    assert metrics_of(ranking, collection, NAMES[:1]) == pytest.approx({"ndcg@10": means["ndcg@10"]}, abs=1e-12)
