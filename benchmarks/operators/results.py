"""Reading the results of the operator benchmark: best entries, best peers, floors."""

from __future__ import annotations

import math
from functools import cached_property

from benchmarks.operators.shapes import Shape

TITLES = {
    "fast": "pylate-fastmaxsim",
    "lik": "late-interaction-kernels",
    "flash": "flash-maxsim",
    "einsum": "einsum",
    "compile": "compiled einsum",
}
PEERS = ("lik", "flash", "einsum", "compile")


class Results:
    """The results file, asked the questions that tables and plots ask.

    ``measure`` is "forward", "forward_winners" or "forward_backward" throughout. ``None`` is the answer where a
    competitor did not run or failed.
    """

    def __init__(self, content: dict) -> None:
        self.cells = content["cells"]

    @cached_property
    def shapes(self) -> list[Shape]:
        """The measured shapes, as recorded with their cells."""
        found = {}
        for cell in self.cells.values():
            if cell["kind"] == "shape":
                fields = {**cell["shape"], "competitors": tuple(cell["shape"]["competitors"])}
                found.setdefault(cell["shape"]["name"], Shape(**fields))
        return list(found.values())

    def group(self, name: str) -> list[Shape]:
        return [shape for shape in self.shapes if shape.group == name]

    def entries(self, shape: Shape, competitor: str) -> dict[str, dict]:
        return self.cells.get(f"{shape.name}/{competitor}", {}).get("entries", {})

    def best(self, shape: Shape, competitor: str, measure: str) -> dict | None:
        """The fastest entry's figures for a measure."""
        measured = [entry[measure] for entry in self.entries(shape, competitor).values() if measure in entry]
        return min((m for m in measured if "ms" in m), key=lambda m: m["ms"], default=None)

    def milliseconds(self, shape: Shape, competitor: str, measure: str) -> float | None:
        best = self.best(shape, competitor, measure)
        return best and best["ms"]

    def best_peer(self, shape: Shape, measure: str) -> tuple[str, dict] | None:
        """The fastest peer and its figures."""
        found = [(peer, best) for peer in PEERS if (best := self.best(shape, peer, measure))]
        return min(found, key=lambda item: item[1]["ms"], default=None)

    def failure(self, shape: Shape, competitor: str, measure: str) -> str | None:
        """Why a competitor has no figure for a measure."""
        cell = self.cells.get(f"{shape.name}/{competitor}", {})
        sentences = [e[measure]["failure"] for e in cell.get("entries", {}).values() if "failure" in e.get(measure, {})]
        return cell.get("failure") or (sentences[0] if sentences else None)

    def same_run(self, shape: Shape, peer: str) -> bool:
        """Whether one run measured a peer and this package."""
        names = [name for each in ("fast", peer) if (name := f"{shape.name}/{each}") in self.cells]
        return all(self.cells[name]["environment"] == self.cells[names[0]]["environment"] for name in names)

    def worst_error(self, shape: Shape, competitor: str) -> float | None:
        """The largest relative error against float64 of any output of any entry; infinite for NaN."""
        errors = [x for e in self.entries(shape, competitor).values() for x in e["errors"].values()]
        errors = [math.inf if x is None else x for x in errors if not isinstance(x, str)]
        return max(errors, default=None)

    def ceilings(self, shape: Shape) -> tuple[float, float]:
        """Operations and bytes a second of the device, from the run that measured this package."""
        cell = self.cells.get(f"{shape.name}/fast") or list(self.cells.values())[-1]
        measured = cell["environment"]["ceilings"]
        rate = f"float32 {shape.precision}" if shape.dtype == "float32" else shape.dtype
        return measured["matmul_flops_per_s"][rate], measured["copy_bytes_per_s"]

    def floor_ms(self, shape: Shape, measure: str) -> float:
        """The least time of an exact MaxSim: the product at the measured rate, or the bytes at the measured bandwidth."""
        flops_per_s, bytes_per_s = self.ceilings(shape)
        return max(shape.flops() / flops_per_s, shape.bytes(measure) / bytes_per_s) * 1e3

    def sweeps(self) -> dict[str, list[tuple[int, Shape]]]:
        """Shapes of each scaling sweep by the size that grows, "Nq", "Nd" and "Ld"."""
        sweeps: dict[str, list[tuple[int, Shape]]] = {}
        for shape in self.group("sweep"):
            _, axis, size = shape.name.split("-")
            sweeps.setdefault(axis, []).append((int(size), shape))
        return {axis: sorted(points, key=lambda point: point[0]) for axis, points in sweeps.items()}

    def largest_step(self, axis: str, measure: str) -> float | None:
        """The largest growth of time over growth of size between neighbouring points of a sweep (linear: 1)."""
        points = [(n, ms) for n, shape in self.sweeps()[axis] if (ms := self.milliseconds(shape, "fast", measure))]
        steps = [(b[1] / a[1]) / (b[0] / a[0]) for a, b in zip(points, points[1:], strict=False)]
        return max(steps, default=None)
