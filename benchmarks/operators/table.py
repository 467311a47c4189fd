"""The markdown tables of the operator benchmark."""

from __future__ import annotations

from benchmarks.harness.tables import mebibytes, table
from benchmarks.operators.competitors import TITLES
from benchmarks.operators.results import Results
from benchmarks.operators.shapes import Shape

HEADLINE = ("tiny", "in-batch", "ColPali", "KD", "rerank", "ragged", "fp16", "fp32")


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
        for best in (results.best(shape, "fast", measure), peer and peer[1]):
            row.append(mebibytes(best and best["peak_bytes"]))
        rows.append(row)
    return table(header, rows)


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


def markdown(content: dict) -> str:
    """The table of docs/benchmarks.md. What else was measured `python -m benchmarks.compare_results` prints."""
    results = Results(content)
    return headline(results) + "\n\n" + "\n".join(f"- {line}" for line in notes(results))
