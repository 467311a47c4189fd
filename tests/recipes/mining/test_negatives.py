"""Pairs to mine with, and hard negatives as sentence_transformers.util.mine_hard_negatives chooses them."""

from contextlib import suppress
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from datasets import Dataset
from sentence_transformers.util import mine_hard_negatives

from pylate_fastmaxsim.recipes.config.schema import DataSection, MiningSection
from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.mining.negatives import hard_negatives
from pylate_fastmaxsim.recipes.mining.pairs import Pairs, load_pairs


class Vectors:
    """What mine_hard_negatives needs of a model, with a given vector for each text."""

    device = torch.device("cpu")
    model_card_data = SimpleNamespace(base_model="")

    def __init__(self, vectors: dict[str, np.ndarray]):
        self.vectors = vectors

    def encode_query(self, texts, **_):
        return np.stack([self.vectors[text] for text in texts])

    encode_document = encode_query

    def similarity(self, queries, documents):
        return torch.from_numpy(queries @ documents.T)

    def similarity_pairwise(self, queries, documents):
        return torch.from_numpy((queries * documents).sum(1))


def test_negatives_are_those_of_mine_hard_negatives():
    queries, documents, short, skipping = 6, 40, 0, 0
    for seed in range(80):
        rng, several = np.random.default_rng(seed), seed % 2
        names = [f"q{i}" for i in range(queries)] + [f"d{i}" for i in range(documents)]
        vectors = rng.normal(size=(len(names), 8)).astype(np.float32)
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        of_query = [query for query in range(queries) for _ in range(rng.integers(1, 4) if several else 1)]
        rows = list(zip(of_query, range(len(of_query)), strict=True))
        rules = {"range_min": int(rng.integers(0, 3)), "range_max": int(rng.integers(5, 14)), "num_negatives": 3}
        rules |= {"relative_margin": rng.choice([None, 0.05, -0.5]), "absolute_margin": rng.choice([None, 0.05, -0.3])}
        rules |= {"max_score": rng.choice([None, None, 0.5]), "min_score": rng.choice([None, None, -0.1])}
        data = Dataset.from_dict({"query": [f"q{q}" for q, _ in rows], "answer": [f"d{d}" for _, d in rows]})
        model = Vectors(dict(zip(names, vectors, strict=True)))
        options = {"corpus": names[queries:], "output_format": "n-tuple", "verbose": False}
        expected = {}
        with suppress(ZeroDivisionError):  # its shares of what is left, where the margins leave nothing
            for row in mine_hard_negatives(data, model, **options, **rules):
                expected[int(row["query"][1:])] = [int(row[f"negative_{place}"][1:]) for place in (1, 2, 3)]
        section = MiningSection(pairs=DataSection(source="hub", name="a"), teacher="b", **rules)
        pairs = Pairs(Dataset.from_dict({"text": names[:queries]}), None, rows, "")
        similarities = torch.from_numpy(vectors[:queries] @ vectors[queries:].T)
        k = section.range_max + max(map(len, pairs.positives()))
        lowest = [min(similarities[q, d].item() for q, d in rows if q == query) for query in range(queries)]
        assert hard_negatives(pairs, section, *similarities.topk(k), lowest) == expected, (seed, rules)
        short += len(expected) < queries
        skipping += bool(expected) and rules["range_min"] > 0
    assert short > 20 and skipping > 20


@pytest.fixture
def load(tmp_path):
    def loaded(pairs: dict, corpus: dict | None = None, **keys) -> Pairs:
        sections = {}
        for name, columns in {"pairs": pairs, "corpus": corpus}.items():
            if columns is not None:
                pq.write_table(pa.table(columns), tmp_path / f"{name}.parquet")
                sections[name] = DataSection("files", files=[str(tmp_path / f"{name}.parquet")], **keys)
        return load_pairs(MiningSection(**sections, teacher="none"))

    return loaded


def test_equal_texts_are_one(load):
    corpus = {"passage": pa.array(["w", "y", "", "w", "X"], pa.large_string())}
    loaded = load({"query": ["a", "b", "a", "a"], "text": ["x", "y", "z", "x"]}, corpus)
    assert loaded.queries["text"][:] == ["a", "b"]
    assert loaded.documents["text"][:] == ["x", "y", "z", "w", "", "X"]
    assert loaded.rows == [(0, 0), (1, 1), (0, 2)] and loaded.positives() == [{0, 2}, {1}]
    lists = load({"query": ["a", "b"], "pos": [["x", "y"], ["x"]]})
    assert lists.positives() == [{0, 1}, {0}]
    with pytest.raises(RecipeError, match="mining.pairs.columns: 'text' must hold a text in every row, but some have"):
        load({"query": ["a", "b"], "text": ["x", None]})


def test_which_pairs_are_kept_depends_on_the_seed(load):
    rows = {"query": [f"question {i}" for i in range(60)], "answer": [f"answer {i}" for i in range(60)]}
    first, again, other = (load(rows, max_rows=8, seed=seed).queries["text"][:] for seed in (0, 0, 1))
    assert len(first) == 8 and first == again and set(first) != set(other)
