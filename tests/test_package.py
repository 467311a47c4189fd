"""The package's public names are listed, and loaded when they are first asked for; what it needs is declared."""

import ast
import re
import subprocess
import sys
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import pytest

import pylate_fastmaxsim


def test_every_public_name_is_listed():
    assert set(pylate_fastmaxsim.__all__) <= set(dir(pylate_fastmaxsim))
    with pytest.raises(AttributeError, match="module 'pylate_fastmaxsim' has no attribute 'maxsims'"):
        pylate_fastmaxsim.maxsims  # noqa: B018


def test_a_name_is_loaded_when_it_is_first_asked_for_and_kept():
    code = (
        "import sys, pylate_fastmaxsim\n"
        "assert 'maxsim' in dir(pylate_fastmaxsim) and 'pylate_fastmaxsim.ops.maxsim' not in sys.modules\n"
        "function = pylate_fastmaxsim.maxsim\n"
        "assert vars(pylate_fastmaxsim)['maxsim'] is function is sys.modules['pylate_fastmaxsim.ops.maxsim'].maxsim\n"
        "for name in pylate_fastmaxsim.__all__:\n"
        "    assert getattr(pylate_fastmaxsim, name) is not None\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# From the bottom up: a room may import those of its line and below.
ROOMS = [
    {"_checks", "_dtypes", "_tracing", "_winners"},
    {"tokens"},
    {"reference", "kernels", "cpu"},
    {"ops"},
    {"retrieval", "search", "corpus"},
    {"integrations"},
    {"recipes"},
    {"cli", "run"},
]
HOSTS = {"pylate", "colpali_engine", "sentence_transformers", "transformers"}


def imported(file):
    """Modules that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{name.name}" for name in node.names)


def test_imports_run_one_way_and_only_rooms_above_the_operators_know_host_libraries():
    folder = Path(pylate_fastmaxsim.__file__).parent
    level = {name: place for place, room in enumerate(ROOMS) for name in room}
    for file in folder.rglob("*.py"):
        own = level.get(file.relative_to(folder).parts[0].removesuffix(".py"))
        if own is None:  # the public face
            continue
        for module in imported(file):
            package, *inside = module.split(".")
            assert package not in HOSTS or own >= level["integrations"], (file, module)
            if package == "pylate_fastmaxsim" and inside:
                assert level.get(inside[0], 0) <= own, (file, module)


def test_what_is_imported_is_declared():
    """Also what another package would bring along, until it no longer does. NumPy is one: PyTorch comes without it."""
    extras = ("pylate", "colpali", "recipes")
    declared = [
        re.match(r"[\w-]+", requirement)[0].replace("_", "-").lower()
        for requirement in requires("pylate-fastmaxsim")
        if "extra ==" not in requirement or requirement.endswith(tuple(f"'{extra}'" for extra in extras))
    ]
    known = packages_distributions()
    for file in Path(pylate_fastmaxsim.__file__).parent.rglob("*.py"):
        for module in imported(file):
            package = module.split(".")[0]
            if package not in sys.stdlib_module_names:
                names = {name.replace("_", "-").lower() for name in known.get(package, [package])}
                assert package == "pylate_fastmaxsim" or names & set(declared), (file, package)
