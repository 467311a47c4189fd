"""What the benchmark of pooling concludes: ratios and tables."""

from __future__ import annotations

from benchmarks.harness.tables import table

# In the order in which they are measured.
POOLINGS = {
    "softmax": "`Softmax(1.0)`",
    "top-4": "`TopK(4)`",
    "max": "`Max()`",
    "lse": "`LogSumExp(0.1)`",
    "top-16": "`TopK(16)`",
}
RAGGED = ("softmax", "top-4", "lse")
COMPETITORS = {
    "fast": "this package",
    "ragged": "this package, ragged",
    "compile": "`torch.compile`",
    "einsum": "einsum",
}
MEASURES = {"forward": "forward", "forward_backward": "forward + backward"}


def milliseconds(cells: dict, shape: str, pooling: str, competitor: str, measure: str) -> float | None:
    return cells.get(f"{shape}/{pooling}/{competitor}", {}).get(measure, {}).get("ms")


def ratio(cells: dict, shape: str, pooling: str, competitor: str, measure: str) -> float | None:
    """How many times faster this package is; ``ragged``: how many times faster ragged batches are than padded ones."""
    ours, other = (milliseconds(cells, shape, pooling, each, measure) for each in ("fast", competitor))
    if ours is None or other is None:
        return None
    return ours / other if competitor == "ragged" else other / ours


def shapes_of(cells: dict) -> list[str]:
    return list(dict.fromkeys(name.partition("/")[0] for name in cells))


def ratios(cells: dict) -> dict[str, dict[str, dict[str, float]]]:
    """Every ratio that can be made, by shape and pooling, then competitor, then measure."""
    found: dict = {}
    for shape in shapes_of(cells):
        for pooling in POOLINGS:
            for competitor in list(COMPETITORS)[1:]:
                for measure in MEASURES:
                    value = ratio(cells, shape, pooling, competitor, measure)
                    if value is not None:
                        of_pooling = found.setdefault(f"{shape}/{pooling}", {})
                        of_pooling.setdefault(competitor, {})[measure] = value
    return found


def _shape_title(shape: str) -> str:
    return shape.replace(".", " against ")


def _entry(result: dict) -> str:
    """Time, and memory: of a forward in all, of forward + backward beyond the gradients."""
    if "ms" not in result:
        failure = result.get("failure", "")
        return "out of memory" if failure.startswith("out of memory") else failure
    memory = result.get("beyond_gradients_bytes", result.get("peak_bytes"))
    return f"{result['ms']:.3g} ms" + ("" if memory is None else f", {memory / 2**20:,.0f} MiB")


def _times(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}x"


def speed_table(cells: dict, measure: str) -> str:
    """This package, torch.compile and einsum, and how many times faster the first is."""
    lines = []
    for shape in shapes_of(cells):
        for pooling, title in POOLINGS.items():
            if f"{shape}/{pooling}/fast" not in cells:
                continue
            entries = [
                _entry(cells.get(f"{shape}/{pooling}/{each}", {}).get(measure, {}))
                for each in ("fast", "compile", "einsum")
            ]
            gains = [_times(ratio(cells, shape, pooling, each, measure)) for each in ("compile", "einsum")]
            lines.append([_shape_title(shape), title, *entries, *gains])
    titles = [COMPETITORS[each] for each in ("fast", "compile", "einsum")]
    return table(["shape", "pooling", *titles, "times compiled", "times einsum"], lines)


def ragged_table(cells: dict) -> str:
    lines = []
    for shape in shapes_of(cells):
        for pooling in RAGGED:
            pair = [
                cells.get(f"{shape}/{pooling}/{each}", {}).get("forward_backward", {}) for each in ("fast", "ragged")
            ]
            if all(pair):
                gain = _times(ratio(cells, shape, pooling, "ragged", "forward_backward"))
                lines.append([_shape_title(shape), POOLINGS[pooling], *map(_entry, pair), gain])
    return table(["shape", "pooling", "padded", "ragged", "speed"], lines)


def error_table(cells: dict) -> str:
    """The largest error of each competitor and pooling over the shapes."""
    lines = []
    for competitor, title in COMPETITORS.items():
        for pooling, name in POOLINGS.items():
            found = [cell["errors"] for key, cell in cells.items() if key.endswith(f"/{pooling}/{competitor}")]
            if not found:
                continue
            entries = []
            for what in ("scores", "query gradient", "document gradient"):
                each = [errors.get(what) for errors in found]
                entries.append("no number" if None in each else f"{max(each):.1e}")
            lines.append([title, name, *entries])
    return table(["", "pooling", "scores", "query gradient", "document gradient"], lines)


def docs_table(content: dict) -> str:
    """The tables of docs/pooling.md."""
    cells, made = content["cells"], content["environment"]
    peers = "; ".join(f"{name} {peer['pooling']}" for name, peer in content["peers"].items())
    return "\n\n".join(
        [
            f"{made['device']}, torch {made['torch']}, triton {made['triton']}, {made['date']}. "
            f"Peers have no such pooling: {peers}.",
            "Forward + backward, and memory beyond inputs and gradients:",
            speed_table(cells, "forward_backward"),
            "Forward without gradient, and memory beyond inputs:",
            speed_table(cells, "forward"),
            "Ragged batches, packed, against the same number of sequences that all have the full length:",
            ragged_table(cells),
        ]
    )


def markdown(content: dict) -> str:
    """Everything, for the terminal."""
    return "\n\n".join([docs_table(content), error_table(content["cells"])])
