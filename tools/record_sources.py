"""Record the sources of host releases that the flag's replacements are known to compute the same as.

    python -m tools.record_sources pylate==1.6.0 colpali-engine==0.3.18

Each release is installed apart, without what it needs, and imported in front of what this environment has. Digests of
the functions that are replaced, and of those that they call, are added to ``known_sources.json``; nothing is taken out.
Without a release, the installed hosts are recorded. Run the tests against a release before you record it: the table
says that the replacements were written for it.

MultiVectorEncoder needs an environment without PyLate, which pins an older Sentence Transformers.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, ModuleType

from pylate_fastmaxsim.integrations.hosts import HOST_PACKAGES, find_replacements
from pylate_fastmaxsim.integrations.patching import known_sources

ROOT = Path(__file__).parents[1]
# Of transformers nothing else is replaced.
MODERNBERT = "transformers.models.modernbert.modeling_modernbert"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("releases", nargs="*", help="as pip takes them, with a version each")
    releases = parser.parse_args().releases
    if not releases:
        record()
    for release in releases:
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run(
                [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "-t", folder, release], check=True
            )
            path = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))
            subprocess.run(
                [sys.executable, "-m", "tools.record_sources"], check=True, env={**os.environ, "PYTHONPATH": path}
            )


def record() -> None:
    """Add what is installed here to the table."""
    found = find_replacements()
    print(*(each.left for each in found if each.patch is None), sep="\n", file=sys.stderr)
    versions = {each.host.package: each.host.version for each in found if each.provider}
    for name in ("sentence_transformers", "transformers"):
        versions.setdefault(name, importlib.import_module(name).__version__)
    table = {name: dict(rows) for name, rows in known_sources.known().items()} if known_sources.TABLE.exists() else {}
    for function in functions():
        row = table.setdefault(known_sources.dotted_name(function), {})
        entry = row.setdefault(known_sources.digest(known_sources.code_of(function)), {"releases": "", "uses": {}})
        version = versions[known_sources.dotted_name(function).partition(".")[0]]
        entry["releases"] = ", ".join(sorted({*filter(None, entry["releases"].split(", ")), version}))
        entry["uses"] = {**entry["uses"], **dict(uses(function))}
    known_sources.TABLE.write_text(text_of(table), encoding="utf-8")
    print(", ".join(f"{package} {version}" for package, version in versions.items()), "are in the table.")


def unknown_sources(files: Path | zipfile.Path, package: str) -> list[str]:
    """Functions in the files of a release that are not the code of a known one, by their source alone.

    Those that something known calls, and those that nothing known calls, which are replaced or relied on: also where a
    module that the table does not have defines them.
    """
    known = {name: rows for name, rows in known_sources.known().items() if name.partition(".")[0] == package}
    called = {name for rows in known.values() for row in rows.values() for name in row["uses"].values()}
    defined = dict(_definitions(files / package, package))
    short = {_short(name) for name in known.keys() - called}
    unread = [name for name in defined if name in known.keys() - called or _short(name) in short]
    unknown, seen = set(), set()
    while unread:
        name = unread.pop()
        if name in seen:
            continue
        seen.add(name)
        rows = known.get(name, {})
        digests = rows.keys() & map(known_sources.digest_of, defined.get(name, ()))
        if not digests:
            unknown.add(name)
        for used in (used for key in digests for used in rows[key]["uses"].values() if isinstance(used, str)):
            unread += [used] * (used.partition(".")[0] == package)
    return sorted(unknown)


def _short(name: str) -> str:
    """A method with its class, without the module; of a function nothing is shorter."""
    owner, _, last = name.rpartition(".")
    kind = owner.rpartition(".")[2]
    return f"{kind}.{last}" if kind[:1].isupper() else name


def _definitions(folder: Path | zipfile.Path, module: str) -> Iterator[tuple[str, list[ast.FunctionDef]]]:
    """Functions of a package by their dotted names; of a property getter and setter."""
    for file in folder.iterdir():
        name = file.name.removesuffix(".py")
        if file.is_dir():
            yield from _definitions(file, f"{module}.{name}")
        elif file.name.endswith(".py"):
            inner = module if name == "__init__" else f"{module}.{name}"
            found: dict[str, list[ast.FunctionDef]] = {}
            _collect(ast.parse(file.read_text(encoding="utf-8")), inner, found)
            yield from found.items()


def _collect(node: ast.AST, name: str, found: dict[str, list[ast.FunctionDef]]) -> None:
    for each in ast.iter_child_nodes(node):
        if isinstance(each, ast.FunctionDef):
            found.setdefault(f"{name}.{each.name}", []).append(each)
        elif isinstance(each, ast.ClassDef):
            _collect(each, f"{name}.{each.name}", found)
        elif isinstance(each, (ast.If, ast.Try)):
            _collect(each, name, found)


def text_of(table: dict[str, dict[str, dict]]) -> str:
    """JSON with a line for each source of a function."""
    rows = []
    for name in sorted(table):
        entries = (f"  {json.dumps(key)}: {json.dumps(entry, sort_keys=True)}" for key, entry in table[name].items())
        rows.append(f" {json.dumps(name)}: {{\n" + ",\n".join(entries) + "\n }")
    return "{\n" + ",\n".join(rows) + "\n}\n"


def functions() -> list[FunctionType]:
    """The functions of the hosts that are replaced, and those that they call."""
    patches = [each.patch for each in find_replacements() if each.patch]
    found, unread = {}, [part for patch in patches for part in (patch.original, *patch.needs)] + also_relied_on()
    while unread:
        function = known_sources.host_function(unread.pop())
        if function is None or not _of_host(function) or function in found:
            continue
        found[function] = None
        unread += [known_sources._look_up(function, name) for name, what in uses(function) if isinstance(what, str)]
    return list(found)


def also_relied_on() -> list[object]:
    """What is not replaced, but computes nothing beside what a replacement takes it to compute."""
    colbert = sys.modules.get("pylate.models.colbert")
    host = importlib.import_module("sentence_transformers")
    names = importlib.import_module("pylate_fastmaxsim.integrations.sparse_encoder.names")
    modernbert = importlib.import_module(MODERNBERT)
    functions = [
        inspect.unwrap(modernbert.ModernBertEncoderLayer.forward),
        modernbert.ModernBertAttention.forward,
        modernbert.ModernBertMLP.forward,
        host.util.cos_sim,
        host.util.dot_score,
        host.SparseEncoder.similarity,
        names.MaskedLanguageModel.forward,
    ]
    return functions if colbert is None else [*functions, colbert.ColBERT.forward]


def uses(function: FunctionType) -> Iterator[tuple[str, str | float]]:
    """Names in the code of a function that are functions of the host, or numbers."""
    node = known_sources._definition(known_sources.code_of(function))
    owner = _owner(function)
    local = {*function.__code__.co_varnames, *function.__code__.co_cellvars}
    called = {id(each.func) for each in ast.walk(node) if isinstance(each, ast.Call)}
    is_method = owner is not None and not isinstance(inspect.getattr_static(owner, function.__name__), staticmethod)
    first = node.args.args[0].arg if is_method and node.args.args else None
    for each in _without_annotations(node):
        if isinstance(each, ast.Name) and each.id not in local:
            value = function.__globals__.get(each.id)
            if type(value) in (int, float):
                yield each.id, value
            elif isinstance(value, type) and _of_host(value) and id(each) in called:
                methods = ((name, _dotted(method)) for name, method in vars(value).items())
                yield from ((f"{each.id}.{name}", known) for name, known in methods if known is not None)
            elif (known := _dotted(value)) is not None:
                yield each.id, known
        elif isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name):
            of = each.value.id
            value = function.__globals__.get(of)
            if of == first and (known := _dotted(getattr(owner, each.attr, None))) is not None:
                yield f"self.{each.attr}", known
            elif (
                of not in local
                and isinstance(value, (type, ModuleType))
                and _of_host(value)
                and (known := _dotted(getattr(value, each.attr, None))) is not None
            ):
                yield f"{of}.{each.attr}", known
        elif (
            isinstance(each, ast.Attribute)
            and isinstance(each.value, ast.Call)
            and ast.unparse(each.value.func) == "super"
        ):
            base = next(base for base in owner.__mro__[1:] if each.attr in vars(base))
            if (known := _dotted(vars(base)[each.attr])) is not None:
                yield f"{base.__name__}.{each.attr}", known


def _without_annotations(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    for name, value in ast.iter_fields(node):
        if name not in known_sources._SILENT_FIELDS:
            for each in value if isinstance(value, list) else [value]:
                if isinstance(each, ast.AST):
                    yield from _without_annotations(each)


def _owner(function: FunctionType) -> type | None:
    name = function.__qualname__.rpartition(".")[0]
    return function.__globals__.get(name) if name else None


def _dotted(value: object) -> str | None:
    function = known_sources.host_function(value)
    if function is None or not _of_host(function) or known_sources.digest(known_sources.code_of(function)) is None:
        return None
    return known_sources.dotted_name(function)


def _of_host(value: object) -> bool:
    module = value.__globals__["__name__"] if isinstance(value, FunctionType) else getattr(value, "__module__", None)
    module = value.__name__ if isinstance(value, ModuleType) else module
    return module == MODERNBERT or str(module).partition(".")[0] in HOST_PACKAGES


if __name__ == "__main__":
    main()
