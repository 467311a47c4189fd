"""Times and memory of two results files, for the cells that both have.

    python -m benchmarks.compare_results benchmarks/results/train_step_h100.json NEW.json

"slower" marks a cell whose fastest run now took longer than its slowest run before.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from benchmarks.harness.tables import figures, table


def devices(node: dict | list) -> set[str]:
    """The devices that the cells were measured on."""
    values = list(node.values()) if isinstance(node, dict) else node
    named = {node["device"]} if isinstance(node, dict) and isinstance(node.get("device"), str) else set()
    return named.union(*(devices(value) for value in values if isinstance(value, (dict, list))))


def compared(before: dict, now: dict) -> str:
    """A markdown table of what both files have."""
    lines = []
    known = dict(figures(before))
    for name, new in figures(now):
        if (old := known.get(name)) is not None:
            ratio = f"{new.ms / old.ms:.2f}" + " slower" * (new.least > old.most)
            memory = ["" if each.mebibytes is None else f"{each.mebibytes:,.0f} MiB" for each in (old, new)]
            lines.append([name, f"{old.ms:,.3f} ms", f"{new.ms:,.3f} ms", ratio, *memory])
    where = f"Before: {', '.join(sorted(devices(before)))}. Now: {', '.join(sorted(devices(now)))}."
    return where + "\n\n" + table(["cell", "before", "now", "ratio", "memory before", "memory now"], lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("now", type=Path)
    options = parser.parse_args()
    print(compared(*(json.loads(path.read_text()) for path in (options.before, options.now))))


if __name__ == "__main__":
    main()
