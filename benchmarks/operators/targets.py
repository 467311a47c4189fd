"""Targets of the operator on an H200, beside what was measured."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.harness.tables import table
from benchmarks.operators.results import PEERS, Results
from benchmarks.operators.shapes import Shape
from benchmarks.operators.table import STEP_LIMIT

FORWARD, WINNERS, BOTH = "forward", "forward_winners", "forward_backward"


def times_faster(results: Results, shape: Shape, measure: str) -> float | None:
    peer, ms = results.best_peer(shape, measure), results.milliseconds(shape, "fast", measure)
    return peer and ms and peer[1]["ms"] / ms


def matrix_rate(results: Results, shape: Shape) -> float | None:
    """Share of the measured matrix rate that the forward with winners reaches."""
    ms = results.milliseconds(shape, "fast", WINNERS)
    return ms and shape.flops() / (ms / 1e3) / results.ceilings(shape)[0]


def excess_memory(results: Results, shape: Shape) -> float | None:
    """MiB of forward + backward beyond gradients and winners."""
    best = results.best(shape, "fast", BOTH)
    if best is None or best["peak_bytes"] is None:
        return None
    return (best["peak_bytes"] - shape.input_bytes() - shape.winner_bytes()) / 2**20


def ragged_ratio(results: Results, shape: Shape, competitors: tuple[str, ...], measure: str) -> float | None:
    """How many times faster packed documents are than the fastest peer, or than all positions scored by this package."""
    own = results.entries(shape, "fast")
    packed = own.get("maxsim of token batches", {}).get(measure, {}).get("ms")
    if competitors:
        others = [ms for peer in competitors if (ms := results.milliseconds(shape, peer, measure))]
    else:
        others = [own.get("maxsim of all positions", {}).get(measure, {}).get("ms")]
    return min(others) / packed if packed and others and all(others) else None


def relative_cost(results: Results, shape: Shape, measure: str) -> float | None:
    """Time of one multiply-add relative to d = 128."""
    base = next((s for s in results.group("dimensions") if s.dim == 128), None)
    if base is None:
        return None
    own, reference = (results.milliseconds(s, "fast", measure) for s in (shape, base))
    return own and reference and (own / shape.flops()) / (reference / base.flops())


def rows(results: Results) -> Iterator[tuple[str, float, float | None, bool]]:
    """Each target: title, bound, what was measured, and whether the bound is a minimum."""
    for shape in results.shapes:
        measures = {FORWARD: "forward"} | ({BOTH: "forward + backward"} if shape.backward else {})
        if shape.group == "in-batch":
            if shape.name != "in-batch-1":
                yield f"{shape.title}: share of the matrix rate with winners", 0.55, matrix_rate(results, shape), True
            yield (
                f"{shape.title}: forward + backward against the best peer",
                2.8,
                times_faster(results, shape, BOTH),
                True,
            )
            yield f"{shape.title}: MiB beyond gradients and winners", 64, excess_memory(results, shape), False
        elif shape.group == "ColPali":
            for (measure, title), bound in zip(measures.items(), (1.2, 1.5), strict=True):
                yield (
                    f"{shape.title}: {title} against the best peer",
                    bound,
                    times_faster(results, shape, measure),
                    True,
                )
        elif shape.group == "KD":
            yield (
                f"{shape.title}: forward + backward against the best peer",
                1.8,
                times_faster(results, shape, BOTH),
                True,
            )
        elif shape.name == "rerank-1000":
            yield f"{shape.title}: against the best peer", 1.0, times_faster(results, shape, FORWARD), True
        elif shape.name == "rerank-10000":
            ms = results.milliseconds(shape, "fast", FORWARD)
            share = ms and shape.bytes(FORWARD) / (ms / 1e3) / results.ceilings(shape)[1]
            yield f"{shape.title}: share of the copy bandwidth", 0.95, share, True
        elif shape.group == "ragged":
            for measure, title in measures.items():
                yield (
                    f"{shape.title}: {title}, against all positions",
                    3.0,
                    ragged_ratio(results, shape, (), measure),
                    True,
                )
                ratio = ragged_ratio(results, shape, PEERS, measure)
                yield f"{shape.title}: {title}, against the best peer", 2.0, ratio, True
        elif shape.group == "fp32":
            for measure, title in measures.items():
                yield f"{shape.title}: {title} against einsum", 1.0, times_faster(results, shape, measure), True
        elif shape.group == "dimensions":
            for measure, title in measures.items():
                cost = relative_cost(results, shape, measure)
                yield f"{shape.title}: {title}, cost of a multiply-add, d = 128 is 1", 2.0, cost, False
    host = results.cells.get("host", {}).get("microseconds", {}).get("maxsim of token batches", {})
    yield "host microseconds of one call, forward", 30, host.get(FORWARD), False
    for axis in results.sweeps():
        for measure, title in ((FORWARD, "forward"), (BOTH, "forward + backward")):
            yield (
                f"sweep over {axis}, {title}: largest step over the trend",
                STEP_LIMIT,
                results.largest_step(axis, measure),
                False,
            )


def accuracy(results: Results) -> Iterator[tuple[str, float, float | None, bool]]:
    """The largest error of this package by dtype. TF32 rounding changes winners, so it has no bound."""
    bounds = {"bfloat16": 1e-2, "float16": 1e-2, "float32": 1e-4}
    for dtype, bound in bounds.items():
        shapes = [s for s in results.shapes if s.dtype == dtype and (dtype != "float32" or s.precision == "highest")]
        found = [error for shape in shapes if (error := results.worst_error(shape, "fast")) is not None]
        yield f"{dtype}: largest relative error of scores and gradients", bound, max(found, default=None), False


def targets(content: dict) -> str:
    """A markdown table of the targets that were measured."""
    lines = []
    results = Results(content)
    for what, bound, measured, least in [*rows(results), *accuracy(results)]:
        if measured is not None:
            met = measured >= bound if least else measured <= bound
            lines.append(
                [what, f"{'at least' if least else 'at most'} {bound:g}", f"{measured:.3g}", "yes" if met else "no"]
            )
    return table(["target", "bound", "measured", "met"], lines)
