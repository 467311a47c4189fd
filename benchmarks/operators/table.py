"""The table of the operator benchmark: the best entries of this package beside those of its peers and the least time."""

from __future__ import annotations

from operator import itemgetter

from benchmarks.harness.tables import mebibytes, table, times
from benchmarks.operators.competitors import TITLES
from benchmarks.operators.shapes import Shape

# Of what has a row; all other shapes are in the results file.
GROUPS = ("tiny", "in-batch", "ColPali", "KD", "rerank", "ragged", "fp16", "fp32")
HEADER = ["shape", "forward", "best peer", "speed-up", "forward with winners"]
HEADER += ["forward + backward", "best peer", "speed-up", "extra memory", "best peer"]
NOTE = (
    "Medians in ms. In brackets: the least possible time as a share of it, which is the longer of the matrix product "
    "at the measured rate and of reading inputs and writing outputs once at the bandwidth of the copy. Extra memory is "
    "the peak beyond the inputs, of forward + backward where there is one. † compares two runs."
)


class Row:
    """What was measured at a shape; a ``measure`` is "forward", "forward_winners" or "forward_backward"."""

    def __init__(self, shape: Shape, cells: dict[str, dict]) -> None:
        self.shape = shape
        self.cells = {each: cells[name] for each in TITLES if (name := f"{shape.name}/{each}") in cells}

    def best(self, competitor: str, measure: str) -> dict | None:
        """The figures of the fastest entry, with its name; None where there is none."""
        entries = self.cells.get(competitor, {}).get("entries", {}).items()
        measured = ({"entry": name, **entry[measure]} for name, entry in entries if "ms" in entry.get(measure, {}))
        return min(measured, key=itemgetter("ms"), default=None)

    def best_peer(self, measure: str) -> tuple[str, dict] | None:
        found = [(peer, best) for peer in list(TITLES)[1:] if (best := self.best(peer, measure))]
        return min(found, key=lambda item: item[1]["ms"], default=None)

    def floor_ms(self, measure: str) -> float:
        """The least time of an exact MaxSim: the product at the measured rate, or the bytes at the measured bandwidth."""
        measured, shape = self.cells["fast"]["environment"]["ceilings"], self.shape
        rate = f"float32 {shape.precision}" if shape.dtype == "float32" else shape.dtype
        seconds = (
            shape.flops() / measured["matmul_flops_per_s"][rate],
            shape.bytes(measure) / measured["copy_bytes_per_s"],
        )
        return max(seconds) * 1e3

    def ours(self, measure: str) -> str:
        """Time, and the least possible time as a share of it."""
        best = self.best("fast", measure)
        return f"{best['ms']:.3f} ({self.floor_ms(measure) / best['ms']:.0%})" if best else ""

    def against(self, measure: str) -> list[str]:
        """The best peer's time and name, and how many times faster this package is."""
        best, found = self.best("fast", measure), self.best_peer(measure)
        if found is None:
            return ["", ""]
        peer, figures = found
        same = not best or self.cells[peer]["environment"] == self.cells["fast"]["environment"]
        speed = times(figures["ms"], best and best["ms"], ".2f")
        entry = "" if peer in ("einsum", "compile") else f" `{figures['entry'].removeprefix('flash_')}`"
        return [f"{figures['ms']:.3f} {TITLES[peer]}{entry}", speed + ("" if same else "†")]

    def entries(self) -> list[str]:
        row = [self.shape.title, self.ours("forward"), *self.against("forward")]
        last = "forward_backward" if self.shape.backward else "forward"
        backward = [self.ours("forward_winners"), self.ours(last), *self.against(last)]
        peer = self.best_peer(last)
        memory = [each and each["peak_bytes"] for each in (self.best("fast", last), peer and peer[1])]
        return [*row, *(backward if self.shape.backward else [""] * 4), *map(mebibytes, memory)]


def rates(runs: list[dict]) -> str:
    """Versions, dates and measured rates of runs on one kind of machine."""
    where, ceilings = runs[0], [run["ceilings"] for run in runs]
    products = ", ".join(
        f"{name} {span([each['matmul_flops_per_s'][name] / 1e12 for each in ceilings], '.0f')}"
        for name in ceilings[0]["matmul_flops_per_s"]
    )
    copied = span([each["copy_bytes_per_s"] / 1e12 for each in ceilings], ".2f")
    return (
        f"{where['device']}, torch {where['torch']}, triton {where['triton']}, {span([run['date'] for run in runs], '')}. "
        f"In the same {'run' if len(runs) == 1 else f'{len(runs)} runs'}: {ceilings[0]['matmul_size']}-cubed matrix "
        f"products at {products} Tflop/s, device-to-device copy at {copied} TB/s, read plus written."
    )


def span(values: list[float] | list[str], form: str) -> str:
    """'smallest to largest', or one value where they are equal."""
    return " to ".join(dict.fromkeys(format(value, form) for value in (min(values), max(values))))


def markdown(content: dict) -> str:
    """Rows by group, then machines with their rates, and what the columns are."""
    cells = content["cells"]
    recorded = [cell["shape"] for cell in cells.values() if "shape" in cell]
    shapes = {each["name"]: Shape(**{**each, "competitors": tuple(each["competitors"])}) for each in recorded}
    ordered = [shape for group in GROUPS for shape in shapes.values() if shape.group == group]
    by_machine: dict[tuple, list[dict]] = {}
    for run in (cell["environment"] for cell in cells.values()):
        key = (run["device"], run["torch"], run["triton"], run["ceilings"]["matmul_size"])
        runs = by_machine.setdefault(key, [])
        runs += [run] if run not in runs else []
    notes = "\n".join(f"- {line}" for line in (*map(rates, by_machine.values()), NOTE))
    return f"{table(HEADER, (Row(shape, cells).entries() for shape in ordered))}\n\n{notes}"
