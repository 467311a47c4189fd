"""(query, positive) pairs of real English text that every machine with PyLate already holds.

A docstring opens with one sentence that says what the object is for, the query. The rest explains it: the document.
"""

import ast
import importlib.util
import inspect
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path

from pylate_fastmaxsim.reporting.progress import Progress

QUERY_WORDS = (4, 40)
POSITIVE_WORDS = (12, 2000)

# Tests and vendored copies repeat the documented text of other modules.
SKIPPED_DIRECTORIES = {"tests", "testing", "test", "_vendor", "externals", "extern"}

_DEFINITIONS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_SIGNATURE = re.compile(r"^[\w.]+\([^\n]*\)(?:\s*->\s*[^\n]+)?\s*$")
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z`*:\[(\"'>\-\d])|\n\s*\n")


def docstring_pairs(packages: Sequence[str], limit: int | None, seed: int = 0) -> list[dict[str, str]]:
    """Pairs from the docstrings of installed packages, read from their sources without importing them.

    Files are visited in an order drawn from ``seed`` until ``limit`` pairs are found (None: all), so the result depends on
    nothing but the arguments and the installed versions. No two pairs share a query or a positive, and no query occurs in
    its positive.
    """
    files = [file for package in packages for file in source_files(package)]
    random.Random(seed).shuffle(files)
    pairs = islice(_distinct_pairs(files), limit)
    return list(Progress("Reading docstrings", limit, unit=" pairs", iterable=pairs))


def _distinct_pairs(files: Iterable[Path]) -> Iterator[dict[str, str]]:
    seen: set[str] = set()
    for pair in map(split_docstring, chain.from_iterable(map(docstrings, files))):
        if pair is not None and seen.isdisjoint(keys := set(map(_normalized, pair))):
            seen |= keys
            yield dict(zip(("query", "positive"), pair, strict=True))


def source_files(package: str) -> list[Path]:
    """The Python files of an installed package in a fixed order, without its tests."""
    root = package_directory(package)
    return [
        file for file in sorted(root.rglob("*.py")) if SKIPPED_DIRECTORIES.isdisjoint(file.relative_to(root).parts[:-1])
    ]


def package_directory(package: str) -> Path:
    """The folder of an installed top-level package, which is not imported."""
    spec = importlib.util.find_spec(package) if "." not in package else None
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"No package named {package!r} is installed.", name=package)
    return Path(spec.submodule_search_locations[0])


def docstrings(file: Path) -> Iterator[str]:
    """The docstrings of a file: of the module, its classes and its functions."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):  # templates and files for other Python versions
        return
    for node in ast.walk(tree):
        if isinstance(node, _DEFINITIONS) and (text := ast.get_docstring(node, clean=False)):
            yield text


def split_docstring(docstring: str) -> tuple[str, str] | None:
    """The first sentence and the rest of a docstring; None if one is too short or too long, or repeats the other."""
    text = inspect.cleandoc(docstring).strip()
    while text and _SIGNATURE.match(text.split("\n", 1)[0]):
        text = text.partition("\n")[2].strip()
    head, *rest = _SENTENCE_END.split(text, maxsplit=1)
    if not rest:
        return None
    query, positive = " ".join(head.split()), rest[0].strip()
    if not _within(query, QUERY_WORDS) or not _within(positive, POSITIVE_WORDS):
        return None
    if _normalized(query) in _normalized(positive):
        return None
    return query, positive


def _within(text: str, bounds: tuple[int, int]) -> bool:
    return bounds[0] <= len(text.split()) <= bounds[1]


def _normalized(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.lower()))
