"""Sparse vectors in JSON lines, as Anserini and Pyserini read them: an id, and the weight of each token."""

import gzip
import json
import math
import os
import zlib
from array import array
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path

from pylate_fastmaxsim._checks import require_count

ENDINGS = (".jsonl", ".json", ".jsonl.gz", ".json.gz")
LARGEST_FLOAT32 = (2 - 2**-23) * 2.0**127

Paths = str | os.PathLike | Iterable[str | os.PathLike]
# Ids, number of entries of each vector, and the terms and weights of all.
Columns = tuple[list[str], array, array, array]


class _Object(list):
    """The pairs of a JSON object, with keys that repeat."""


def _files(where: str, paths: Paths) -> list[Path]:
    """The files of ``paths``; those of a folder are in the order of their names."""
    files = []
    for path in map(Path, [paths] if isinstance(paths, (str, os.PathLike)) else paths):
        inside = [path]
        if path.is_dir():
            inside = sorted(file for file in path.iterdir() if file.name.endswith(ENDINGS))
            if not inside:
                raise ValueError(f"{where}: the folder {path} holds no file that ends in {', '.join(ENDINGS)}.")
        for file in inside:
            if not file.is_file():
                raise FileNotFoundError(f"{where}: there is no file {file}.")
        files += inside
    return files


def read_columns(
    where: str,
    paths: Paths,
    vocabulary: Mapping[str, int] | int,
    size: int | None,
    batch_size: int,
    start: int = 0,
) -> tuple[int, Iterator[Columns]]:
    """Number of terms, and batches of ``batch_size`` vectors, without the first ``start``."""
    numbers = vocabulary if isinstance(vocabulary, Mapping) else None
    if numbers is None:
        size = require_count(where, "vocabulary", vocabulary)
    else:
        known = max(numbers.values(), default=-1) + 1
        size = known if size is None else require_count(where, "size", size)
        if size < known:
            raise ValueError(f"{where}: size must be at least {known}, as many terms as vocabulary has, got {size}.")
    return size, _columns(where, _files(where, paths), numbers, size, batch_size, start)


def _columns(
    where: str, files: list[Path], numbers: Mapping[str, int] | None, size: int, batch_size: int, start: int
) -> Iterator[Columns]:
    lines = islice((line for file in files for line in _lines(where, file)), start, None)
    while True:
        columns = [], array("q"), array("q"), array("d")
        for place, line in islice(lines, batch_size):
            try:
                name, terms, weights = _parse(line, numbers, size)
            except ValueError as error:
                raise ValueError(f"{where}: {place}: {error}") from None
            for column, new in zip(columns, ([name], [len(terms)], terms, weights), strict=True):
                column.extend(new)
        if not columns[0]:
            return
        yield columns


def _lines(where: str, path: Path) -> Iterator[tuple[str, bytes]]:
    """Each line that is not blank, with its place for errors."""
    number = 0
    with path.open("rb") as raw:
        zipped = raw.peek(2)[:2] == b"\x1f\x8b" or path.suffix == ".gz"
        try:
            if zipped and not raw.peek(1):
                raise EOFError("it is empty")
            with gzip.open(raw) if zipped else raw as lines:
                for line in lines:
                    number += 1
                    if not line.isspace():
                        yield f"{path}, line {number}", line
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ValueError(
                f"{where}: {path}, line {number + 1}: the gzip file is truncated or damaged ({error})."
            ) from None


def _parse(line: bytes, numbers: Mapping[str, int] | None, size: int) -> tuple[str, list[int], list[float]]:
    """Id, terms and weights of a line. ValueError says what is wrong with it."""
    try:
        entry = json.loads(line, object_pairs_hook=_Object)
    except ValueError as error:
        raise ValueError(f"not a whole JSON object ({error}).") from None
    fields = dict(entry) if isinstance(entry, _Object) else {}
    vector = fields.get("vector")
    if fields.get("id") is None or not isinstance(vector, _Object):
        raise ValueError('must be an object with "id" and "vector", an object of tokens and their weights.')
    tokens, weights = map(list, zip(*vector, strict=True)) if vector else ([], [])
    if numbers is None:
        terms = [int(token) if token.isdecimal() else -1 for token in tokens]
        if terms and not 0 <= min(terms) <= max(terms) < size:
            wrong = next(token for token, term in zip(tokens, terms, strict=True) if not 0 <= term < size)
            raise ValueError(f"keys must be numbers of terms from 0 to {size - 1}, got {wrong!r}.")
    else:
        try:
            terms = list(map(numbers.__getitem__, tokens))
        except KeyError as error:
            raise ValueError(f"the token {error} is not in the vocabulary.") from None
    if not set(map(type, weights)) <= {float, int}:
        raise ValueError("weights must be numbers.")
    # A NaN makes the sum one, wherever it stands.
    if weights and not (min(weights) >= 0 and max(weights) <= LARGEST_FLOAT32 and math.isfinite(sum(weights))):
        wrong = next(weight for weight in weights if not 0 <= weight <= LARGEST_FLOAT32)
        raise ValueError(f"weights must be at least 0 and finite in float32, got {wrong}.")
    return str(fields["id"]), terms, weights
