"""Write the generated parts of docs/: keys of recipes, arguments of commands, lines of log, scripts of examples/.

    python -m tools.references

A block of code below ``<!-- file: examples/NAME.py -->`` is that file. docs/reference.md has the keys and the arguments,
from the dataclasses of recipes and the parsers of commands. docs/limits.md has a row for each line of log; what the line
means is kept there by hand. A line that is new gets a row without a meaning, which the tests refuse.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from benchmarks.harness.tables import replace_marked, table
from pylate_fastmaxsim.cli import COMMANDS, command_parser
from pylate_fastmaxsim.comparison.script_child import script_comparison_parser
from pylate_fastmaxsim.integrations.run_script import script_parser
from pylate_fastmaxsim.recipes.config.kinds import RECIPES
from pylate_fastmaxsim.recipes.config.parse import section_of

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "pylate_fastmaxsim"
_TYPES = {
    bool: "bool",
    int: "int",
    float: "float",
    str: "text",
    list[str]: "list",
    list[float]: "floats",
    dict: "mapping",
}
_GROUPS = {
    tuple(RECIPES): "",
    ("colbert", "multi_vector", "splade"): "texts",
    ("colbert", "multi_vector"): "late",
    ("colpali", "colqwen2"): "pages",
}


def recipe_keys() -> str:
    """A table of the keys of each section; keys that kinds of model share stand in it once."""
    sections: dict[str, dict[tuple[str, ...], list[str]]] = {}
    for kind, recipe in RECIPES.items():
        for section, row in _keys("", recipe):
            sections.setdefault(section, {}).setdefault(row, []).append(kind)
    parts, order = [], {section: place for place, section in enumerate(sections)}
    for section, rows in sections.items():
        kinds = {tuple(kinds) for kinds in rows.values()}
        title, header = f"### {section or 'The recipe itself'}", ["key", "value", "default", "meaning"]
        if len(kinds) == 1:
            title += f" ({_group(kinds.pop())})".replace(" ()", "")
            lines = [list(row) for row in rows]
        else:
            header.insert(3, "kinds")
            lines = [[*row[:3], _group(tuple(kinds)), row[3]] for row, kinds in rows.items()]
        made = table(header, lines)
        for other, more in sections.items():
            left_out = ", ".join(row[0] for row in more if row not in rows)
            # Of sections with the same keys the first has them.
            if rows.keys() < more.keys() or (rows.keys() == more.keys() and order[other] < order[section]):
                made = f"Keys of `{other}`{left_out and f' but {left_out}'}."
        parts.append(f"{title}\n\n{made}")
    return "\n\n".join(parts)


def _group(kinds: tuple[str, ...]) -> str:
    return _GROUPS.get(kinds, ", ".join(kinds))


def _keys(section: str, of: type) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Each key of a section, as ``section, row``, with those of the sections in it."""
    hints = get_type_hints(of)
    inner = []
    for each in fields(of):
        options = [option for option in get_args(hints[each.name]) or [hints[each.name]] if option is not type(None)]
        [dataclass] = [option for option in options if is_dataclass(option)] or [None]
        if dataclass is not None:
            inner.append((f"{section}.{each.name}" if section else each.name, dataclass))
        if section == "model" and each.name == "kind":
            values = ", ".join(f"`{kind}`" for kind in RECIPES)
            yield section, ("`kind`", values, "`colbert`", "kind of model, which decides the keys of a recipe")
        elif "meaning" in each.metadata:
            yield section, (f"`{each.name}`", _value(each, hints[each.name]), _default(each), _meaning(each, of, hints))
    for name, dataclass in inner:
        yield from _keys(name, dataclass)


def _value(key: Field, hint: Any) -> str:
    """The type of a key with its limits and what it counts."""
    options = get_args(hint) if get_origin(hint) not in (Literal, list, dict, None) else (hint,)
    kind, *more = [option for option in options if option is not type(None)]
    if section_of(kind) not in (None, kind):
        return "list of sections"
    if more:
        return " or ".join(_TYPES[each] for each in (kind, *more))
    if get_origin(kind) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(kind))
    if is_dataclass(kind):
        return "section"
    limits = key.metadata.get("limits", {})
    signs = {"minimum": "≥", "above": ">", "maximum": "≤"}
    bounds = [f"{sign} {limits[name]}" for name, sign in signs.items() if limits.get(name) is not None]
    unit = key.metadata.get("unit")
    value = " ".join([_TYPES[dict if get_origin(kind) is dict else kind], *bounds])
    return f"{value}, {unit}" if unit else value


def _default(key: Field) -> str:
    if key.default is key.default_factory is MISSING:
        return "required"
    if key.default is MISSING:
        return "`{}`"
    if key.default is None:
        return ""
    plain = str(key.default).lower() if isinstance(key.default, bool) else key.default
    return f"`{plain:g}`" if isinstance(plain, float) else f"`{plain}`"


def _meaning(key: Field, section: type, hints: dict[str, Any]) -> str:
    only = key.metadata.get("only") or ()
    names = [value for value in only if value in get_args(hints[section.SELECTOR])]
    return key.metadata["meaning"] + (f" (only {', '.join(names)})" if names else "")


def commands() -> str:
    """A table of the arguments of each command."""
    run = script_parser("fastmaxsim run", COMMANDS["run"])
    parsers = {f"fastmaxsim {name}": command_parser(name) for name in COMMANDS if name != "run"}
    parsers |= {
        "fastmaxsim run SCRIPT": run,
        "fastmaxsim compare SCRIPT": script_comparison_parser("fastmaxsim compare"),
    }
    parts, said = [], set()
    for title, parser in parsers.items():
        rows = [row for action in parser._actions if (row := _argument(action))]
        again = [row[0] for row in rows if row[1] in said]
        new = [row for row in rows if row[1] not in said]
        text = f"### {title}\n\n{parser.description}"
        text += f" Also {', '.join(again)}, as above." if again else ""
        parts.append(f"{text}\n\n{table(['argument', 'meaning'], new)}" if new else text)
        said |= {row[1] for row in rows}
    return "\n\n".join(parts)


def _argument(action: argparse.Action) -> list[str] | None:
    if isinstance(action, argparse._HelpAction):
        return None
    value = "" if action.nargs == 0 or not action.option_strings else f" {action.metavar or _placeholder(action)}"
    names = ", ".join(action.option_strings) or action.metavar or action.dest
    return [f"`{names}{value}`", (action.help or "") % vars(action)]


def _placeholder(action: argparse.Action) -> str:
    if isinstance(action, argparse.BooleanOptionalAction):
        return ""
    return "|".join(action.choices) if action.choices else action.dest.upper()


def log_lines() -> list[str]:
    """The lines that the package logs, each once; ``...`` stands for names and reasons."""
    found: dict[str, None] = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        named = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                named[node.targets[0].id] = node.value
        # Lines that are logged elsewhere, or after a choice, are named constants.
        texts = [
            value for name, value in named.items() if re.fullmatch("_?[A-Z_]+|left_alone", name) and _is_line(value)
        ]
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and re.fullmatch(r"log_once|_?logger\.\w+", ast.unparse(node.func)):
                texts += [named.get(getattr(value, "id", None), value) for value in node.args[:2]]
        found |= dict.fromkeys(line for text in texts if (line := _line(text)) is not None)
    return list(found)


def _is_line(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and isinstance(value.value, str) and value.value.endswith(": %s.")


def _line(text: ast.expr) -> str | None:
    """The text of a line; None if it is no sentence."""
    if isinstance(text, ast.JoinedStr):
        parts = [part.value if isinstance(part, ast.Constant) else "..." for part in text.values]
    elif isinstance(text, ast.Constant) and isinstance(text.value, str):
        parts = [text.value]
    else:
        return None
    line = re.sub(r"%[sd]|\{\}", "...", "".join(parts)).replace("....", "...")
    return line if line.endswith(".") and re.search("[a-z]{3} [a-z]", line) else None


def quoted_lines(page: str) -> list[str]:
    """The lines in the first columns of the tables of a page."""
    return re.findall(r"`(.+?)`", "".join(re.findall(r"^\|(.+?) \| ", page, flags=re.MULTILINE)))


def with_lines_of_log(page: str) -> str:
    """docs/limits.md with the lines as they are logged now; one that is new has a row at the end of "Others"."""
    logged, quoted = log_lines(), quoted_lines(page)
    gone = [line for line in quoted if line not in logged]
    for line in (line for line in logged if line not in quoted):
        before = get_close_matches(line, gone, n=1, cutoff=0.5)
        page = page.replace(f"`{before[0]}`", f"`{line}`") if before else f"{page.rstrip()}\n| `{line}` | | |\n"
    return page


def with_files(page: str) -> str:
    """A page with the scripts of examples/ as they are now."""
    mark = r"(<!-- file: (examples/\w+\.py) -->\n```python\n).*?```"
    return re.sub(mark, lambda m: f"{m[1]}{(ROOT / m[2]).read_text(encoding='utf-8')}```", page, flags=re.DOTALL)


def updated() -> dict[Path, str]:
    """The pages with generated parts, made anew."""
    reference, limits = ROOT / "docs" / "reference.md", ROOT / "docs" / "limits.md"
    made = {"commands": commands(), "recipe-keys": recipe_keys()}
    text = replace_marked(str(reference), reference.read_text(encoding="utf-8"), made)
    pages = {path: with_files(path.read_text(encoding="utf-8")) for path in (ROOT / "docs").glob("*.md")}
    return pages | {reference: text, limits: with_lines_of_log(limits.read_text(encoding="utf-8"))}


if __name__ == "__main__":
    for path, text in updated().items():
        path.write_text(text, encoding="utf-8")
