"""Markdown tables, entries that several of them have, and their places in documents."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    def line(cells: Sequence[str]) -> str:
        return "|" + "|".join(f" {cell} " if cell else " " for cell in cells) + "|"

    return "\n".join([line(header), "|---" * len(header) + "|", *map(line, rows)])


def mebibytes(count: int | None) -> str:
    return "" if count is None else f"{count / 2**20:,.0f} MiB"


def time_and_memory(result: dict, digits: str = ".3g") -> str:
    """Milliseconds and memory of a measure, in place of all memory that beyond the gradients; or why there are none."""
    if "ms" not in result:
        failure = result.get("failure", "")
        return "out of memory" if failure.startswith("out of memory") else failure
    memory = result.get("beyond_gradients_bytes", result.get("peak_bytes"))
    return ", ".join(filter(None, [f"{result['ms']:{digits}} ms", mebibytes(memory)]))


def times(other: float | None, ours: float | None, digits: str = ".1f") -> str:
    """How many times as much another takes."""
    return f"{other / ours:{digits}}x" if other and ours else ""


def machine(environment: dict, *packages: str) -> str:
    """The device, versions and date of a cell."""
    versions = (f"{name} {environment[name]}" for name in ("torch", *packages) if environment.get(name))
    return ", ".join([environment["device"], *versions, environment["date"]])


# Milliseconds of a unit, by the key of a time.
UNITS = {"ms": 1, "seconds": 1e3, "step_seconds": 1e3}


def _figures(node: dict, path: tuple[str, ...] = ()) -> Iterator[tuple[str, str, str]]:
    """Every time in the cells of a results file, with its name and, where it was measured, peak memory."""
    gib = node.get("peak_gib")
    memory = mebibytes(node.get("peak_bytes") if gib is None else gib * 2**30)
    for key, value in node.items():
        if isinstance(value, dict):
            yield from _figures(value, path if key in ("cells", "entries") else (*path, key))
        elif isinstance(value, float) and key in UNITS:
            yield " ".join(path), f"{value * UNITS[key]:,.3f} ms", memory


def figures_table(content: dict) -> str:
    """All times and memory of a results file."""
    return table(["", "time", "memory"], _figures(content))


def replace_marked(name: str, text: str, made: Mapping[str, str]) -> str:
    """The text of a document with the parts between their marks made anew."""
    for mark, part in made.items():
        pattern = f"(<!-- {mark} -->\n).*?(<!-- /{mark} -->)"
        text, count = re.subn(pattern, lambda match, new=part: f"{match[1]}{new}\n{match[2]}", text, flags=re.DOTALL)
        if count != 1:
            raise ValueError(f"{name} must have one place marked {mark}, found {count}.")
    return text
