"""The examples in the docstrings of the modules that need no host library and no network."""

import doctest
import importlib

import pytest

MODULES = (
    "tokens",
    "reference",
    "ops.maxsim",
    "ops.head",
    "ops.xtr",
    "cpu.maxsim",
    "integrations.patching",
    "integrations.redirection",
    "search",
    "corpus",
    "tuning.search",
    "tuning.report",
    "recipes.disk",
)


@pytest.mark.parametrize("module", MODULES)
def test_examples_run(module):
    failed, _ = doctest.testmod(importlib.import_module(f"pylate_fastmaxsim.{module}"))
    assert failed == 0
