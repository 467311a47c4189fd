"""Tables of cases that are written as text."""

import re

import pytest


def cases(table: str) -> list[list[str]]:
    """The cells of each line, with bars between them. A line that is indented goes on with the one before."""
    lines = re.sub(r"\n\s+", " ", table.strip()).splitlines()
    return [[cell.strip() for cell in re.split(r"(?:^| )\|(?= |$)", line)] for line in lines]


def case_table(written: str) -> pytest.MarkDecorator:
    """A test for each case of a table, whose first line names the arguments."""
    names, *rows = cases(written)
    return pytest.mark.parametrize(names, rows)
