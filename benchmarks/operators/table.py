"""The markdown tables of the operator benchmark."""

from __future__ import annotations

from benchmarks.harness.tables import table
from benchmarks.operators.results import PEERS, TITLES, Results
from benchmarks.operators.shapes import Shape

HEADLINE = ("tiny", "in-batch", "ColPali", "KD", "rerank", "ragged", "fp16", "fp32")


def milliseconds(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def mebibytes(figures: dict | None) -> str:
    if figures is None or figures["peak_bytes"] is None:
        return ""
    return f"{figures['peak_bytes'] / 2**20:,.0f} MiB"


def ours(results: Results, shape: Shape, measure: str) -> str:
    """Time, and the least possible time as a share of it."""
    ms = results.milliseconds(shape, "fast", measure)
    if ms is None:
        return results.failure(shape, "fast", measure) or ""
    return f"{ms:.3f} ({results.floor_ms(shape, measure) / ms:.0%})"


def against(results: Results, shape: Shape, measure: str) -> list[str]:
    """The best peer's time and name, and how many times faster this package is."""
    peer, ms = results.best_peer(shape, measure), results.milliseconds(shape, "fast", measure)
    if peer is None:
        return ["", ""]
    name, figures = peer
    mark = "" if results.same_run(shape, name) else "†"
    return [f"{figures['ms']:.3f} {TITLES[name]}", f"{figures['ms'] / ms:.2f}x{mark}" if ms else ""]


def headline(results: Results) -> str:
    header = ["shape", "forward", "best peer", "speed-up", "forward with winners"]
    header += ["forward + backward", "best peer", "speed-up"]
    header += ["extra memory", "best peer"]
    rows = []
    for shape in (shape for group in HEADLINE for shape in results.group(group)):
        measure = "forward_backward" if shape.backward else "forward"
        peer = results.best_peer(shape, measure)
        row = [shape.title, ours(results, shape, "forward"), *against(results, shape, "forward")]
        if shape.backward:
            row += [ours(results, shape, "forward_winners"), ours(results, shape, measure)]
            row += against(results, shape, measure)
        else:
            row += [""] * 4
        rows.append([*row, mebibytes(results.best(shape, "fast", measure)), mebibytes(peer and peer[1])])
    return table(header, rows)


def failures(results: Results) -> str:
    """A sentence for each shape that a competitor could not compute."""
    lines = []
    for shape in results.shapes:
        for competitor in shape.competitors:
            measures = ("forward", *(["forward_backward"] if shape.backward else []), "errors")
            found = {m: s for m in measures if (s := results.failure(shape, competitor, m))}
            if found and not any(results.best(shape, competitor, m) for m in found):
                lines.append(f"- {shape.title}, {TITLES[competitor]}: {next(iter(found.values()))}")
    return "\n".join(lines)


def ragged(results: Results) -> str:
    """Every entry by itself, to show what padding costs."""
    rows = []
    for shape in results.group("ragged"):
        for competitor in ("fast", *PEERS):
            for name, entry in results.entries(shape, competitor).items():
                times = [entry.get(m, {}).get("ms") for m in ("forward", "forward_winners", "forward_backward")]
                rows.append([f"{TITLES[competitor]}, {name}", *map(milliseconds, times)])
    header = ["ragged, each entry by itself", "forward", "forward with winners", "forward + backward"]
    return table(header, rows) if rows else ""


def dimensions(results: Results) -> str:
    """Time of one multiply-add relative to d = 128."""
    shapes = results.group("dimensions")
    base = next((shape for shape in shapes if shape.dim == 128), None)
    if base is None:
        return ""

    def cost(shape: Shape, measure: str) -> float | None:
        ms = results.milliseconds(shape, "fast", measure)
        return ms and ms / shape.flops()

    rows = []
    for shape in sorted(shapes, key=lambda shape: shape.dim):
        row = [str(shape.dim), f"{shape.queries} x {shape.query_length}, {shape.documents} x {shape.document_length}"]
        for measure in ("forward", "forward_backward"):
            own, reference = cost(shape, measure), cost(base, measure)
            relative = f"{own / reference:.2f}" if own and reference else ""
            row += [ours(results, shape, measure), relative, *against(results, shape, measure)]
        rows.append(row)
    side = ["per multiply-add, d = 128 is 1", "best peer", "speed-up"]
    return table(["d", "shape", "forward", *side, "forward + backward", *side], rows)


def accuracy(results: Results) -> str:
    """The largest relative error against float64 of scores and gradients.

    Where rounding changes the winner, a gradient changes by a whole token vector, with einsum in 16 bits as well.
    """
    groups = [group for group in HEADLINE if results.group(group)]
    rows = []
    for shape in (shape for group in groups for shape in results.group(group)):
        errors = [results.worst_error(shape, competitor) for competitor in ("fast", *PEERS)]
        rows.append([shape.title, *("" if error is None else f"{error:.1e}" for error in errors)])
    return table(["largest relative error", *TITLES.values()], rows)


def runs_by_machine(results: Results) -> dict[tuple, list[dict]]:
    """The runs of the cells, grouped by machine and versions."""
    found: dict[tuple, list[dict]] = {}
    for cell in results.cells.values():
        run = cell["environment"]
        runs = found.setdefault((run["device"], run["torch"], run["triton"], run["ceilings"]["matmul_size"]), [])
        if run not in runs:
            runs.append(run)
    return found


def machine(runs: list[dict]) -> str:
    """Versions, dates and measured rates of runs on one kind of machine."""
    where, ceilings = runs[0], [run["ceilings"] for run in runs]
    rates = ", ".join(
        f"{name} {span([each['matmul_flops_per_s'][name] / 1e12 for each in ceilings], '.0f')}"
        for name in ceilings[0]["matmul_flops_per_s"]
    )
    dates = span([run["date"] for run in runs], "")
    return (
        f"{where['device']}, torch {where['torch']}, triton {where['triton']}, {dates}. "
        f"In the same {'run' if len(runs) == 1 else f'{len(runs)} runs'}: {ceilings[0]['matmul_size']}-cubed matrix products at "
        f"{rates} Tflop/s, device-to-device copy at {span([each['copy_bytes_per_s'] / 1e12 for each in ceilings], '.2f')} "
        "TB/s, read plus written."
    )


def span(values: list[float] | list[str], form: str) -> str:
    """'smallest to largest', or one value where they are equal."""
    return " to ".join(dict.fromkeys(format(value, form) for value in (min(values), max(values))))


def notes(results: Results) -> list[str]:
    """Machines with their rates, and what the columns are."""
    return [
        *(machine(runs) for runs in runs_by_machine(results).values()),
        "Medians in ms. In brackets: the least possible time as a share of it, which is the longer of the matrix product "
        "at the measured rate and of reading inputs and writing outputs once at the bandwidth of the copy. Extra memory is "
        "the peak beyond the inputs, of forward + backward where there is one. † compares two runs.",
    ]


def details(results: Results) -> list[str]:
    """Bandwidth, host time and the sweeps' steps."""
    lines = []
    for shape in results.group("rerank"):
        if ms := results.milliseconds(shape, "fast", "forward"):
            bandwidth = shape.bytes("forward") / (ms / 1e3)
            share = bandwidth / results.ceilings(shape)[1]
            lines.append(f"{shape.title}: {bandwidth / 1e12:.2f} TB/s, {share:.0%} of the copy.")
    if host := results.cells.get("host", {}).get("microseconds"):
        for name, times in host.items():
            each = ", ".join(f"{measure.replace('_', ' + ', 1)} {us:.0f} us" for measure, us in times.items())
            lines.append(f"Host time of one call, {name}: {each}.")
    for axis in results.sweeps():
        for measure, title in (("forward", "forward"), ("forward_backward", "forward + backward")):
            if step := results.largest_step(axis, measure):
                lines.append(f"Sweep over {axis}, {title}: largest step {step:.2f} of the trend.")
    return lines


def bullets(lines: list[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def docs_table(content: dict) -> str:
    """What docs/benchmarks.md shows."""
    results = Results(content)
    return headline(results) + "\n\n" + bullets(notes(results))


def markdown(content: dict) -> str:
    """All tables."""
    results = Results(content)
    if not results.shapes:
        return "Nothing has been measured."
    parts = [docs_table(content), bullets(details(results)), ragged(results), dimensions(results), accuracy(results)]
    unable = failures(results)
    parts.append("What could not be done:\n\n" + unable if unable else "")
    return "\n\n".join(part for part in parts if part)
