"""What the benchmark of SPLADE's head concludes: ratios, bounds, tables."""

from __future__ import annotations

from benchmarks.harness.tables import table

ENTRIES = {
    "stock": "Linear + `SpladePooling`",
    "compiled": "the same, `torch.compile`",
    "fast": "this package",
    "padded": "this package, padded",
}
MEASURES = {"forward": "forward", "forward_backward": "forward + backward"}
# By texts and the length that they are padded to.
SHAPE_NAMES = ("64x256", "256x256", "32x512")
# Texts of a vocabulary of 250,002.
GROWING = {f"{texts}x256, 250k": texts for texts in (16, 32, 64, 128, 256, 512)}


def out_of_memory(cell: dict) -> bool:
    return "out of memory" in str(cell)


def _measure(cells: dict, shape: str, entry: str, density: str, measure: str) -> dict:
    return cells.get(f"{shape}/{entry}", {}).get(density, {}).get(measure, {})


def ratio(cells: dict, shape: str, entry: str, density: str, measure: str, key: str = "ms") -> float | None:
    """How many times as much as this package another implementation takes."""
    ours, other = (_measure(cells, shape, each, density, measure).get(key) for each in ("fast", entry))
    return other / ours if ours and other else None


def _entry(result: dict) -> str:
    if "ms" not in result:
        failure = result.get("failure", "")
        return "out of memory" if out_of_memory(result) else failure
    memory = result.get("peak_bytes")
    return f"{result['ms']:.3g} ms" + ("" if memory is None else f", {memory / 2**20:,.0f} MiB")


def _times(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}x"


def speed_table(cells: dict, measure: str) -> str:
    """Time and memory beyond inputs of every implementation, and how many times faster this package is."""
    shapes = dict.fromkeys(name.rpartition("/")[0] for name in cells)
    measured = {key: title for key, title in ENTRIES.items() if any(name.endswith(f"/{key}") for name in cells)}
    lines = []
    for shape in shapes:
        # Of the large vocabulary what counts is who is out of memory, whatever is positive.
        for density in ("dense",) if shape in GROWING else ("dense", "sparse"):
            positive = cells.get(f"{shape}/fast", {}).get(density, {}).get("positive")
            entries = [_entry(_measure(cells, shape, each, density, measure)) for each in measured]
            gains = [_times(ratio(cells, shape, each, density, measure)) for each in ("stock", "compiled")]
            lines.append([shape, "" if positive is None else f"{positive:.0%}", *entries, *gains])
    return table(["texts", "positive", *measured.values(), "times stock", "times compiled"], lines)


def error_table(cells: dict) -> str:
    """The largest relative error of each implementation over the shapes."""
    lines = []
    for entry, title in ENTRIES.items():
        found = [
            of_density["errors"]
            for name, cell in cells.items()
            for of_density in (cell.get("dense", {}), cell.get("sparse", {}))
            if name.endswith(f"/{entry}") and "errors" in of_density
        ]
        if found:
            largest = {name: [errors[name] for errors in found] for name in found[0]}
            lines.append([title, *("no number" if None in each else f"{max(each):.1e}" for each in largest.values())])
    return table(["", "values", "hidden gradient", "weight gradient", "bias gradient"], lines)


def docs_table(cells: dict) -> str:
    """The tables of docs/splade.md."""
    made = next(iter(cells.values()))["environment"]
    return "\n\n".join(
        [
            f"{made['device']}, torch {made['torch']}, triton {made['triton']}, Sentence Transformers "
            f"{made['sentence-transformers']}, {made['date']}. Forward + backward, and memory beyond inputs:",
            speed_table(cells, "forward_backward"),
            "Forward without gradient:",
            speed_table(cells, "forward"),
            "Largest relative errors against float64:",
            error_table(cells),
        ]
    )
