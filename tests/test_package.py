"""The package's public names are listed, and loaded when they are first asked for; what it needs is declared, and examples run."""

import ast
import doctest
import importlib
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
        "assert None not in [getattr(pylate_fastmaxsim, name) for name in pylate_fastmaxsim.__all__]\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# Of each package its rooms from the bottom up. A room may import what stands left of a `<` before it, and nothing else.
ROOMS = {
    "": (
        "_dtypes _install _memory _winners < _checks files < reporting < _impacts pooling < tokens sparse codec < compressed "
        "< _operands < reference kernels cpu < ops < retrieval diagnostics < indexes integrations < losses "
        "comparison export < recipes < precompile mteb < cli run compare"
    ),
    "files": "replace < lock record < resumed",
    "reporting": "numbers table figures environment progress < page",
    "kernels": (
        "runtime < primitives < maxsim winner_backward projection attention layers sparse "
        "< xtr pooled compressed splade token_pooling"
    ),
    "retrieval": (
        "topk impacts ids batching < formats < corpus < search plaid sparse < plaid_writer static < soundness"
    ),
    "indexes": "storage < exact",
    "export": "source < parquet qdrant < run",
    "integrations": (
        "log options < status patching < models < compilation < encoding < inference < pylate sentence_transformers colpali < "
        "sparse_encoder < hosts < enable < run_script doctor"
    ),
    "comparison": "gate < turns trainer < verdict < script_child figures < report < script",
    "losses": "columns views < pylate multi_vector colpali < encode < contrastive_distillation matryoshka < pooled_contrastive",
    "recipes": (
        "errors < config files < plugin kind compression pooling < data < models < evaluation trainers < kinds "
        "validate trainer_arguments < load json_schema < training < targets < mining comparison search < robustness"
    ),
}
# Used where it is there; where not, a line of log or an error says what to install. PyTorch brings the release of `cuda`
# that fits its own, and PyLate brings fastkmeans.
OPTIONAL = {"cuda", "fastkmeans", "model2vec", "mteb", "qdrant_client"}
PACKAGE = Path(pylate_fastmaxsim.__file__).parent


def imported(file, inside=True):
    """Modules that a file imports, anywhere in it or outside of its functions."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for node in ast.walk(tree) if inside else tree.body:
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{name.name}" for name in node.names)


def room_of(module, package):
    """The room of ``package`` that a module lies in, or None."""
    inside = module.removeprefix(f"pylate_fastmaxsim.{package}.".replace("..", "."))
    return None if inside == module else inside.partition(".")[0]


@pytest.mark.parametrize("package", ROOMS)
def test_imports_run_one_way(package):
    level = {room: line for line, rooms in enumerate(ROOMS[package].split(" < ")) for room in rooms.split()}
    for file in (PACKAGE / package).rglob("*.py"):
        module = ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts)
        room = room_of(module, package)
        if room == "__init__":
            continue
        assert room in level, f"{module} stands in no room: name it in ROOMS."
        for other in imported(file):
            # What is no room is a name of the package itself.
            below = room_of(other, package)
            assert below not in level or below == room or level[below] < level[room], (module, other)


def test_only_what_stands_above_the_operators_knows_host_libraries():
    for file in PACKAGE.rglob("*.py"):
        room = file.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if room not in ("integrations", "losses", "comparison", "recipes", "precompile", "cli", "run"):
            hosts = {"pylate", "colpali_engine", "sentence_transformers", "transformers"}
            assert not hosts & {module.partition(".")[0] for module in imported(file)}, file


def test_comparing_needs_no_extra_until_it_reports():
    for file in (PACKAGE / "comparison").glob("*.py"):
        packages = {module.partition(".")[0] for module in imported(file, inside=False)}
        assert packages <= sys.stdlib_module_names | {"torch", "numpy", "pylate_fastmaxsim"}, (file.name, packages)


def test_a_folder_at_any_depth_holds_at_most_twelve_files_of_its_own():
    # Private modules of the root do not count: they are small, and a folder for them would be a room without a subject.
    for folder in (PACKAGE, *(path for path in PACKAGE.rglob("*") if path.is_dir())):
        private = "_" if folder == PACKAGE else "__"
        files = sorted(file.name for file in folder.glob("*.py") if not file.name.startswith(private))
        assert len(files) <= 12, (folder.name, files)


def test_what_is_imported_is_declared():
    """Also what another package would bring along, until it no longer does. NumPy is one: PyTorch comes without it."""
    extras = ("pylate", "colpali", "recipes", "commands")
    declared = [
        re.match(r"[\w-]+", requirement)[0].replace("_", "-").lower()
        for requirement in requires("pylate-fastmaxsim")
        if "extra ==" not in requirement or requirement.endswith(tuple(f"'{extra}'" for extra in extras))
    ]
    known = packages_distributions()
    for file in PACKAGE.rglob("*.py"):
        for module in imported(file):
            package = module.split(".")[0]
            if package not in sys.stdlib_module_names | OPTIONAL:
                names = {name.replace("_", "-").lower() for name in known.get(package, [package])}
                assert package == "pylate_fastmaxsim" or names & set(declared), (file, package)


EXAMPLES = [
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
    for path in sorted(PACKAGE.rglob("*.py"))
    if ">>>" in path.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("module", EXAMPLES)
def test_examples_of_docstrings_run(module, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    failed, attempted = doctest.testmod(importlib.import_module(module))
    assert failed == 0 and attempted > 0
