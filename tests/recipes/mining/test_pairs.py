"""Pairs and a corpus: distinct texts, whatever the type and the place they come from."""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset

from pylate_fastmaxsim.recipes.config.schema import DataSection, MiningSection
from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.mining.pairs import load_pairs


def test_equal_texts_are_one(tmp_path):
    pairs = {"query": ["a", "b", "a", "a"], "text": ["x", "y", "z", "x"]}
    pq.write_table(pa.table(pairs), tmp_path / "pairs.parquet")
    corpus = pa.table({"passage": pa.array(["w", "y", "", "w", "X"], pa.large_string())})
    pq.write_table(corpus, tmp_path / "corpus.parquet")
    files = {
        name: DataSection(source="files", files=[str(tmp_path / f"{name}.parquet")]) for name in ("pairs", "corpus")
    }
    loaded = load_pairs(MiningSection(**files, teacher="none"))
    assert loaded.queries["text"][:] == ["a", "b"]
    assert loaded.documents["text"][:] == ["x", "y", "z", "w", "", "X"]
    assert loaded.rows == [(0, 0), (1, 1), (0, 2)] and loaded.positives() == [{0, 2}, {1}]

    pq.write_table(pa.table({"query": ["a", "b"], "text": ["x", None]}), tmp_path / "pairs.parquet")
    with pytest.raises(RecipeError, match="mining.pairs.columns: 'text' must hold a text in every row, but some have"):
        load_pairs(MiningSection(**files, teacher="none"))


def test_which_pairs_are_kept_depends_on_the_seed(tmp_path):
    rows = {"query": [f"question {i}" for i in range(60)], "answer": [f"answer {i}" for i in range(60)]}
    Dataset.from_dict(rows).to_parquet(tmp_path / "pairs.parquet")
    data = DataSection(source="files", files=[str(tmp_path / "pairs.parquet")], max_rows=8)
    first, again, other = (
        load_pairs(MiningSection(pairs=replace(data, seed=seed), teacher="none")).queries["text"][:]
        for seed in (0, 0, 1)
    )
    assert len(first) == 8 and first == again and set(first) != set(other)
