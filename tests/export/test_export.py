"""Exports of each kind of folder to each target: all documents with their ids, also after a kill, and what is refused."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from pyarrow.parquet import read_table

from pylate_fastmaxsim import TokenBatch, read_plaid
from pylate_fastmaxsim.export import parquet
from pylate_fastmaxsim.export.run import export
from pylate_fastmaxsim.retrieval import plaid_writer
from tests.support.corpora import vectors
from tests.support.power_cut import states, written
from tests.support.stored import COUNT, KINDS, shrink

pytest.importorskip("rich")

Found = dict[str | int, list]  # what is stored of each document, by its id


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Have few documents be many batches, groups, files and chunks."""
    shrink(monkeypatch)
    monkeypatch.setattr(parquet, "TOKENS", 7)
    monkeypatch.setattr(parquet, "DOCUMENTS", 3)
    monkeypatch.setattr(parquet, "GROUPS", 2)
    monkeypatch.setattr(plaid_writer, "TOKENS_PER_BATCH", 7)
    monkeypatch.setattr(plaid_writer, "TOKENS_PER_CHUNK", 20)


def held(name: str) -> Found:
    """The documents of a folder of a kind, as they were given to it: rounded to its format, or terms with weights."""
    kind = KINDS[name]
    if isinstance(kind.batch(0, 1), TokenBatch):
        ids = getattr(kind, "ids", range(COUNT))
        found = dict(zip(ids, kind.expected, strict=True))
    else:
        documents = kind.documents
        pairs = zip(documents.terms.tolist(), documents.weights.tolist(), strict=True)
        found = {at: [next(pairs) for _ in range(n)] for at, n in enumerate(documents.offsets.diff().tolist())}
    removed = [kind.removed] if name == "index" else getattr(kind, "removed", ())
    return {each: found[each] for at, each in enumerate(found) if at not in removed}


def of_parquet(at: Path) -> Found:
    rows = read_table(at).to_pylist()
    return {
        row["id"]: row["vectors"] if "vectors" in row else [*zip(row["indices"], row["values"], strict=True)]
        for row in rows
    } | ({} if len({row["id"] for row in rows}) == len(rows) else {"twice": rows})


def of_plaid(at: Path) -> Found:
    corpus = read_plaid(at)
    return dict(zip(corpus.ids, vectors(corpus.batches()), strict=True))


READ: dict[str, Callable[[Path], Found]] = {"parquet": of_parquet, "plaid": of_plaid}
CASES = [(to, name) for to in READ for name in ("bfloat16", "int8", "residual", "index", "sparse", "saved")]
CASES = [(to, name) for to, name in CASES if to != "plaid" or name in ("residual", "index")]


def assert_exported(to: str, name: str, at: Path) -> None:
    found, expected = READ[to](at), held(name)
    assert [*found] == [*expected]
    for each, stored in expected.items():
        if name in ("sparse", "saved"):
            assert found[each] == stored
            continue
        assert len(found[each]) == len(stored)
        # float16; and PLAID's vectors have length 1, and of a codec that is trained here are near.
        tolerance = 1e-3 if to != "plaid" else 4e-3 if name == "residual" else 0.6
        wanted = torch.nn.functional.normalize(torch.tensor(stored).view(-1, 16), dim=-1) if to == "plaid" else stored
        assert torch.allclose(torch.tensor(found[each]).view(-1), torch.as_tensor(wanted).view(-1), atol=tolerance)


@pytest.mark.parametrize(("to", "name"), CASES)
def test_after_any_kill_the_same_call_writes_what_is_missing(to, name, tmp_path):
    folder, at = tmp_path / "from", tmp_path / "to"
    KINDS[name].write(folder)
    at.mkdir()
    done = []
    found = states(at, lambda: done.append(export(folder, to, str(at))), cuts=1)
    assert done == [len(held(name))] and len(found) > 15
    assert_exported(to, name, at)
    assert export(folder, to, str(at)) == done[0]
    assert_exported(to, name, at)
    for number, (_, state) in enumerate(found[:: 1 if to == "parquet" else 3]):
        left = written(state, tmp_path / str(number))
        export(folder, to, str(left))
        assert_exported(to, name, left)
