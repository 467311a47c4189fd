import json

import pytest
import torch

from pylate_fastmaxsim import SparseBatch
from pylate_fastmaxsim.retrieval.impacts import read_impacts


@pytest.fixture
def files(tmp_path):
    lines = [json.dumps({"id": f"d{i}", "vector": {str(i % 5): i + 1, "7": 0.5}}) for i in range(11)]
    # A batch goes on in the next file, and blank lines are no vectors.
    for name, part in (("a.jsonl", lines[:4]), ("b.jsonl", ["", *lines[4:]])):
        (tmp_path / name).write_text("\n".join(part) + "\n")
    return tmp_path


@pytest.mark.parametrize("start", [0, 1, 4, 11, 12])
def test_batches_hold_what_is_behind_the_start(files, start):
    pairs = list(read_impacts(files, 8, 3, start=start))
    rest = max(0, 11 - start)
    assert [len(batch) for _, batch in pairs] == [3] * (rest // 3) + [rest % 3] * (rest % 3 > 0)
    assert [name for ids, _ in pairs for name in ids] == [f"d{i}" for i in range(start, 11)]
    whole = SparseBatch.from_jsonl(files, 8)
    for place, (_, batch) in enumerate(pairs):
        expected = whole.select(torch.arange(start + 3 * place, start + 3 * place + len(batch)))
        assert torch.equal(batch.terms, expected.terms) and torch.equal(batch.weights, expected.weights)


def test_a_bad_line_comes_after_the_batches_before_it(files):
    (files / "b.jsonl").write_text("{}")
    batches = read_impacts(files, 8, 2)
    assert [ids for ids, _ in (next(batches), next(batches))] == [["d0", "d1"], ["d2", "d3"]]
    with pytest.raises(ValueError, match=r"^read_impacts: \S+b.jsonl, line 1: must be an object"):
        next(batches)
    with pytest.raises(ValueError, match="read_impacts: batch_size must be at least 1, got 0"):
        read_impacts(files, 8, 0)
    with pytest.raises(FileNotFoundError):
        read_impacts(files / "c.jsonl", 8)
