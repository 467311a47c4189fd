"""The examples in the docstrings of the package."""

import doctest
import importlib
from pathlib import Path

import pytest

import pylate_fastmaxsim

PACKAGE = Path(pylate_fastmaxsim.__file__).parent
MODULES = [
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
    for path in sorted(PACKAGE.rglob("*.py"))
    if ">>>" in path.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("module", MODULES)
def test_examples_run(module, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    failed, attempted = doctest.testmod(importlib.import_module(module))
    assert failed == 0 and attempted > 0
