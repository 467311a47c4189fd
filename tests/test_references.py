"""The generated parts of docs/ are those of the code, and each key, argument and line of log has a meaning."""

from __future__ import annotations

import ast
import re
from dataclasses import fields, is_dataclass
from typing import get_args, get_type_hints

import pytest

from pylate_fastmaxsim.recipes.config.kinds import RECIPES
from pylate_fastmaxsim.recipes.config.schema import key
from tests.support.examples import PAGES
from tests.support.paths import ROOT
from tools.references import log_lines, quoted_lines, updated

LIMITS = PAGES["docs/limits.md"]


def test_generated_parts_are_those_of_the_code():
    for path, text in updated().items():
        assert text == path.read_text(encoding="utf-8"), "run: python -m tools.references"


@pytest.mark.parametrize("kind", RECIPES)
def test_each_key_has_a_row_with_its_meaning(kind):
    """Counted by hand, without what writes the page."""

    def rows(section, of):
        hints = get_type_hints(of)
        for each in fields(of):
            path = f"{section}.{each.name}" if section else each.name
            inner = [option for option in get_args(hints[each.name]) or [hints[each.name]] if is_dataclass(option)]
            if not inner or each.metadata:
                yield section, each
            for option in inner:
                yield from rows(path, option)

    page = PAGES["docs/reference.md"]
    for section, each in rows("", RECIPES[kind]):
        table = re.search(
            rf"^### {section or 'The recipe itself'}( \([\w, ]+\))?\n\n(.+?)\n\n", page + "\n", re.M | re.S
        )
        if of_other := re.match(r"Keys of `([\w.]+)` but", table[2]):
            table = re.search(rf"^### {of_other[1]}( \([\w, ]+\))?\n\n(.+?)\n\n", page + "\n", re.M | re.S)
        found = re.findall(rf"^\| `{each.name}` \|.*\| (\S.*) \|$", table[2], flags=re.MULTILINE)
        assert found, f"{section}.{each.name}"
        assert (section, each.name) == ("model", "kind") or any(
            row.startswith(each.metadata["meaning"]) for row in found
        )


def test_a_key_cannot_be_without_a_meaning():
    with pytest.raises(TypeError):
        key(default=None)


def test_each_argument_has_a_meaning():
    table = PAGES["docs/reference.md"].partition("<!-- commands -->")[2].partition("<!-- /commands -->")[0]
    rows = re.findall(r"^\| (.*?) \| ?(.*?) ?\|$", table, flags=re.MULTILINE)
    assert len(rows) > 40 and all(meaning for _, meaning in rows), rows


def test_each_line_of_log_is_quoted_whole_and_has_a_meaning():
    quoted = quoted_lines(LIMITS)
    assert len(log_lines()) > 40
    for line in log_lines():
        assert quoted.count(line) == 1, line
    for row in re.findall(r"^\| `.+$", LIMITS, flags=re.MULTILINE):
        _, why, what_to_do = row.removesuffix("|").split(" |")[:3]
        assert why.strip() or what_to_do.strip(), row


def test_what_is_quoted_is_in_the_code():
    """Reasons and errors too, which are no lines of log of their own; ... stands for names."""
    texts = [
        node.value
        for file in (ROOT / "pylate_fastmaxsim").rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    whole = set(log_lines())
    for part in (part.strip() for line in quoted_lines(LIMITS) if line not in whole for part in line.split("...")):
        assert any(part in text for text in texts), part
