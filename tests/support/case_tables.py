"""Tables of cases that are written as text."""

import re


def cases(table: str) -> list[list[str]]:
    """The cells of each line, which `` | `` separates. A line that is indented goes on with the one before."""
    lines = re.sub(r"\n\s+", " ", table.strip()).splitlines()
    return [[cell.strip() for cell in line.split(" | ")] for line in lines]
