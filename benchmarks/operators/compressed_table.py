"""What the benchmark of compressed documents concludes: ratios and tables."""

from __future__ import annotations

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
PACKED = "32x32.100000x80.packed"


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


def docs_table(content: dict) -> str:
    """The table of docs/compressed.md."""
    made = content["environment"]
    versions = ", ".join(f"{name} {made[name]}" for name in ("torch", "triton", "late-interaction-kernels", "flash-maxsim"))  # fmt: skip
    return f"{made['device']}, {versions}, {made['date']}.\n\n{speed_table(content['cells'])}"


def markdown(content: dict) -> str:
    """Everything, for the terminal."""
    return "\n\n".join([docs_table(content), cells_table(content["cells"])])
