"""Reading the results of the operator benchmark: best entries, best peers, floors."""

from __future__ import annotations

from functools import cached_property

from benchmarks.operators.shapes import Shape

PEERS = ("lik", "flash", "einsum", "compile")


class Results:
    """The results file, asked the questions that the table asks.

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
