"""What the benchmark of compressed documents concludes: ratios, bounds, tables."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.harness.tables import table

COMPETITORS = {
    "fast": "this package",
    "naive": "decompress, then einsum",
    "lik": "late-interaction-kernels",
    "flash": "flash-maxsim",
}
# Each format of this package, and the first words of what others call theirs.
FORMATS = {
    "int8 by document": "int8",
    "int8 by token": "int8",
    "fp8": "fp8",
    "residual 4 bits": "residual 4 bits",
    "residual 2 bits": "residual 2 bits",
}
MANY, ONE, PACKED = "256x32.512x300", "1x32.10000x300", "32x32.100000x80.packed"


def milliseconds(cells: dict, shape: str, competitor: str, form: str, measure: str = "forward") -> float | None:
    return cells.get(f"{shape}/{competitor}/{form}", {}).get(measure, {}).get("ms")


def fastest(cells: dict, shape: str, competitors: tuple[str, ...], form: str) -> tuple[str, float] | None:
    """The fastest way of some competitors to score a format of this package, and its milliseconds."""
    found = []
    for key in cells:
        of_shape, competitor, name = key.split("/")
        ms = milliseconds(cells, of_shape, competitor, name)
        if of_shape == shape and competitor in competitors and name.startswith(FORMATS[form]) and ms:
            found.append((competitor, ms))
    return min(found, key=lambda item: item[1], default=None)


def shapes_of(cells: dict) -> list[str]:
    return list(dict.fromkeys(name.partition("/")[0] for name in cells))


def ratios(cells: dict) -> dict[str, float]:
    """How many times faster each way is than this package's bfloat16 forward at the same shape."""
    found = {}
    for key in cells:
        shape, competitor, form = key.split("/")
        base, ms = milliseconds(cells, shape, "fast", "bf16"), milliseconds(cells, shape, competitor, form)
        if base and ms:
            found[key] = base / ms
    return found


def times(cells: dict, shape: str, form: str, competitors: tuple[str, ...] = ()) -> float | None:
    """How many times faster a format is than the fastest of some competitors, or than bfloat16 of this package."""
    ours = milliseconds(cells, shape, "fast", form)
    if competitors:
        other = fastest(cells, shape, competitors, form)
        other = other and other[1]
    else:
        other = milliseconds(cells, shape, "fast", "bf16")
    return other / ours if other and ours else None


def _bounds(cells: dict) -> Iterator[tuple[str, str, str, str, float, float | None]]:
    """Kind, shape, format, what it is compared with, how many times faster it should be, and how many times it is."""
    bf16 = "bf16 of this package"
    for shape, factor in ((MANY, 1.45), (ONE, 2)):
        yield "must", shape, "int8 by document", bf16, factor, times(cells, shape, "int8 by document")
    versus = times(cells, PACKED, "int8 by document", ("flash",))
    yield "must", PACKED, "int8 by document", COMPETITORS["flash"], 8, versus
    yield "must", MANY, "fp8", bf16, 1.5, times(cells, MANY, "fp8")
    for shape, form, factor in ((MANY, "fp8", 3.5), (PACKED, "fp8", 10)):
        yield "must", shape, form, COMPETITORS["lik"], factor, times(cells, shape, form, ("lik",))
    yield "must", MANY, "residual 4 bits", bf16, 1 / 1.1, times(cells, MANY, "residual 4 bits")
    for shape, factor in ((MANY, 100), (ONE, 10)):
        versus = times(cells, shape, "residual 4 bits", ("lik",))
        yield "must", shape, "residual 4 bits", COMPETITORS["lik"], factor, versus
    for form in ("int8 by document", "fp8"):
        yield "goal", MANY, form, bf16, 1.8, times(cells, MANY, form)
    for form in ("residual 4 bits", "residual 2 bits"):
        yield "goal", ONE, form, bf16, 0.5, times(cells, ONE, form)


def checks(cells: dict) -> list[dict]:
    """Every bound beside what was measured; ``met`` is ``None`` where that is missing."""
    return [
        {
            "kind": kind,
            "shape": shape,
            "form": form,
            "versus": versus,
            "times_faster": factor,
            "measured": measured,
            "met": None if measured is None else measured >= factor,
        }
        for kind, shape, form, versus, factor, measured in _bounds(cells)
    ]


def _shape_title(shape: str) -> str:
    return shape.replace(".packed", ", packed").replace(".", " against ")


def _times(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}x" if value < 10 else f"{value:,.0f}x"


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:,.3g} ms" if value < 1000 else f"{value:,.0f} ms"


def speed_table(cells: dict) -> str:
    """Each format of this package beside its own bfloat16, the fastest peer and the naive way."""
    lines = []
    for shape in shapes_of(cells):
        for form in ("bf16", *FORMATS):
            ms = milliseconds(cells, shape, "fast", form)
            if ms is None:
                continue
            line = [_shape_title(shape), form, _ms(ms), _times(times(cells, shape, form))]
            if form == "bf16":
                line += [""] * 4
            else:
                peer = fastest(cells, shape, ("lik", "flash"), form)
                line += [f"{_ms(peer[1])} ({COMPETITORS[peer[0]]})" if peer else ""]
                line += [_times(times(cells, shape, form, ("lik", "flash")))]
                plain = milliseconds(cells, shape, "naive", form)
                line += [_ms(plain), _times(plain and plain / ms)]
            lines.append(line)
    peer, plain = (["fastest peer", "speed"], [COMPETITORS["naive"], "speed"])
    return table(["shape", "documents", COMPETITORS["fast"], "times bf16", *peer, *plain], lines)


def _error(cell: dict, name: str) -> str:
    errors = cell.get("errors", {})
    return f"{errors[name]:.1e}" if name in errors else errors.get("failure", "")


def _result(cell: dict, measure: str) -> str:
    result = cell.get(measure)
    if result is None:
        return cell.get("failure") or cell.get("skipped", "")
    if "ms" not in result:
        return result["failure"]
    memory = result.get("peak_bytes")
    return _ms(result["ms"]) + ("" if memory is None else f", {memory / 2**20:,.1f} MiB")


def cells_table(cells: dict) -> str:
    """Every cell: time and memory, the gradient of the queries, errors, stored bytes."""
    found, lines = ratios(cells), []
    for key, cell in cells.items():
        shape, competitor, form = key.split("/")
        size = f"{cell['stored_bytes'] / 2**20:,.1f}" if "stored_bytes" in cell else ""
        gradient = _result(cell, "query_gradient") if "query_gradient" in cell else ""
        entries = [_result(cell, "forward"), _times(found.get(key)), gradient]
        kept = [_error(cell, "definition"), _error(cell, "uncompressed")]
        lines.append([_shape_title(shape), COMPETITORS[competitor], form, size, *entries, *kept])
    return table(
        [
            "shape", "", "documents", "MiB stored", "forward", "times bf16", "forward + gradient of queries",
            "error", "error with compression",
        ],
        lines,
    )  # fmt: skip


def musts_table(entries: list[dict]) -> str:
    lines = []
    for entry in entries:
        met = {True: "yes", False: "no", None: "not measured"}[entry["met"]]
        place = [entry["kind"], _shape_title(entry["shape"]), entry["form"], entry["versus"]]
        lines.append([*place, f">= {entry['times_faster']:.3g}x", _times(entry["measured"]), met])
    return table(["", "shape", "documents", "against", "wanted", "measured", "met"], lines)


def docs_table(content: dict) -> str:
    """The table of docs/compressed.md."""
    made = content["environment"]
    versions = ", ".join(f"{name} {made[name]}" for name in ("torch", "triton", "late-interaction-kernels", "flash-maxsim"))  # fmt: skip
    return f"{made['device']}, {versions}, {made['date']}.\n\n{speed_table(content['cells'])}"


def markdown(content: dict) -> str:
    """Everything, for the terminal."""
    return "\n\n".join([docs_table(content), cells_table(content["cells"]), musts_table(content["musts"])])
