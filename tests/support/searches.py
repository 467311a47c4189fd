"""Searches by the command line, and what they write."""

from pathlib import Path

import pytest

from tests.support.beir_folder import tables
from tests.support.command_line import Done, fastmaxsim

DOCUMENTS = [f"{row['title']} {row['text']}".strip() for row in tables()["corpus"]]
NAMES = [row["_id"] for row in tables()["corpus"]]
QUERIES = [row["text"] for row in tables()["queries"]]


def search(*arguments: object, code: int = 0) -> Done:
    """Run ``fastmaxsim search``; where it fails, as it should, it says so in one line."""
    return fastmaxsim(["search", *arguments, "--batch-size", "8"], code=code)


def read_run(file: Path) -> dict[str, dict[str, float]]:
    """The scores of the documents of each query, in the order of the file."""
    found: dict[str, dict[str, float]] = {}
    for line in file.read_text().splitlines():
        query, q0, document, rank, score, tag = line.split(" ")
        found.setdefault(query, {})[document] = float(score)
        assert (q0, int(rank), tag) == ("Q0", len(found[query]), "fastmaxsim")
    return found


def assert_same(run: Path, other: Path, rel: float = 1e-5) -> None:
    """The same documents with the same scores, up to rounding: texts may have been encoded in other batches."""
    found, expected = read_run(run), read_run(other)
    assert list(found) == list(expected)
    for query, results in found.items():
        assert results == pytest.approx(expected[query], rel=rel)
