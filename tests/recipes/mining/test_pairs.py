import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pylate_fastmaxsim.recipes.config.schema import DataSection, MiningSection
from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.mining.pairs import Pairs, load_pairs


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
