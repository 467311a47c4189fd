"""What the benchmark of pooling concludes: ratios, bounds, tables."""

from __future__ import annotations

from collections.abc import Iterator

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
LARGE, *SMALLER = ("256x32.512x300", "128x32.128x180", "64x128.64x1024")


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


def _bounds(cells: dict) -> Iterator[tuple[str, str, str, str, float, float | None, bool]]:
    """Kind, shape, pooling, what is measured, the bound, what was measured, and whether the bound is a minimum."""
    both = "forward_backward"

    def speed(shape: str, pooling: str, competitor: str) -> float | None:
        return ratio(cells, shape, pooling, competitor, both)

    for shape in (LARGE, *SMALLER):
        # Times einsum and times torch.compile.
        wanted = {
            "softmax": (12, 2.5) if shape == LARGE else (9, 1.7),
            "top-4": (20, 20) if shape == LARGE else (7, 7),
        }
        for pooling, factors in wanted.items():
            for competitor, factor in zip(("einsum", "compile"), factors, strict=True):
                measured = speed(shape, pooling, competitor)
                yield "must", shape, pooling, f"forward + backward, times {competitor}", factor, measured, True
        if shape == LARGE:
            for pooling in wanted:
                beyond = cells.get(f"{shape}/{pooling}/fast", {}).get(both, {}).get("beyond_gradients_bytes")
                mib = None if beyond is None else beyond / 2**20
                yield "must", shape, pooling, "forward + backward, MiB beyond the gradients", 120, mib, False
        for pooling in RAGGED:
            measured = speed(shape, pooling, "ragged")
            yield "must", shape, pooling, "forward + backward, ragged, times padded", 1.8, measured, True
    for competitor, factor in (("einsum", 15), ("compile", 3.2)):
        measured = speed(LARGE, "softmax", competitor)
        yield "goal", LARGE, "softmax", f"forward + backward, times {competitor}", factor, measured, True
    top, maximum = (milliseconds(cells, LARGE, pooling, "fast", "forward") for pooling in ("top-4", "max"))
    measured = None if top is None or maximum is None else top / maximum
    yield "goal", LARGE, "top-4", "forward, time relative to the maximum", 2, measured, False


def checks(cells: dict) -> list[dict]:
    """Every bound beside what was measured; ``met`` is ``None`` where that is missing."""
    found = []
    for kind, shape, pooling, what, bound, measured, least in _bounds(cells):
        met = None if measured is None else measured >= bound if least else measured <= bound
        entry = {"kind": kind, "shape": shape, "pooling": pooling, "what": what}
        found.append({**entry, "wanted": f"{'>=' if least else '<='} {bound:g}", "measured": measured, "met": met})
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


def musts_table(entries: list[dict]) -> str:
    lines = []
    for entry in entries:
        measured = "" if entry["measured"] is None else f"{entry['measured']:.3g}"
        met = {True: "yes", False: "no", None: "not measured"}[entry["met"]]
        title = POOLINGS[entry["pooling"]]
        lines.append(
            [entry["kind"], _shape_title(entry["shape"]), title, entry["what"], entry["wanted"], measured, met]
        )
    return table(["", "shape", "pooling", "", "wanted", "measured", "met"], lines)


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
    return "\n\n".join([docs_table(content), error_table(content["cells"]), musts_table(content["musts"])])
