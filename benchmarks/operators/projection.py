"""From hidden states to MaxSim scores on one GPU: the fused projection against Linear, normalize and each peer.

    python -m benchmarks.operators.projection                         # measure what is missing, then print the table
    python -m benchmarks.operators.projection --render-only           # the table of the committed results
    python -m benchmarks.operators.projection --shapes in-batch --entries fast lik lik-fused --again
    python -m benchmarks.operators.projection --shapes tiny --entries fast einsum --results /tmp/head.json   # a trial on a CPU
    python -m benchmarks.operators.projection --sweep                 # times of tile sizes, into results/head_trials.json

A cell is one implementation at one shape, in a process of its own: forward without gradient, forward + backward with
the gradients of queries, hidden states and weight, their memory, and their error against float64.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools

import torch

from benchmarks.harness.paths import RESULTS
from benchmarks.harness.records import Results, add_options, environment
from benchmarks.harness.tables import table
from benchmarks.harness.timing import peak_bytes, time_calls
from benchmarks.harness.workers import ask_apart, serve
from benchmarks.operators.measure import relative_error, spread
from benchmarks.operators.projection_entries import ENTRIES, SHAPES, Inputs, Shape, make_inputs


def measure(shape: Shape, entry: str, device: torch.device) -> dict:
    """Times, memory and errors of one implementation at one shape."""
    score = ENTRIES[entry][1]
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=shape.autocast)
    inputs = make_inputs(shape, device, seed=0)

    def forward() -> torch.Tensor:
        with torch.no_grad(), autocast:
            return score(inputs)

    grad = torch.randn_like(forward())

    def both() -> tuple[torch.Tensor, ...]:
        with autocast:
            scores = score(inputs)
        return torch.autograd.grad(scores, inputs.leaves(), grad)

    result = {"environment": environment(), "gradient_bytes": sum(leaf.nbytes for leaf in inputs.leaves())}
    for name, call in (("forward", forward), ("forward_backward", both)):
        result[name] = {**time_calls([call], device), "peak_bytes": peak_bytes(call, device)}
    with autocast:
        result["errors"] = errors(score, shape, inputs)
    return result


def errors(score, shape: Shape, inputs: Inputs) -> dict[str, float | None]:
    """Relative errors against float64 over a few queries and documents, the only ones whose scores have a gradient."""
    device = inputs.queries.device
    rows, columns = spread(shape.queries, 4, device), spread(shape.documents, 8, device)
    hidden = inputs.hidden[rows][:, columns] if shape.candidates else inputs.hidden[columns]
    exact = [t.detach().double().requires_grad_() for t in (inputs.queries[rows], hidden, inputs.weight)]
    with torch.autocast(device.type, enabled=False):
        vectors = torch.nn.functional.normalize(exact[1] @ exact[2].T, dim=-1)
        equation = "qsh,qdth->qdst" if shape.candidates else "qsh,dth->qdst"
        expected = torch.einsum(equation, exact[0], vectors).amax(dim=-1).sum(dim=-1)
    scores = score(inputs)
    weights = torch.randn(expected.shape, device=device, dtype=torch.float64).to(scores.dtype)
    grad = torch.zeros_like(scores)
    grad[rows[:, None], columns] = weights
    gradients = list(torch.autograd.grad(scores, inputs.leaves(), grad))
    wanted = torch.autograd.grad(expected, exact, weights.double())
    gradients[0] = gradients[0][rows]
    gradients[1] = gradients[1][rows][:, columns] if shape.candidates else gradients[1][columns]
    names = ("query gradient", "hidden gradient", "weight gradient")
    found = {name: relative_error(own, other) for name, own, other in zip(names, gradients, wanted, strict=True)}
    return {"scores": relative_error(scores.detach()[rows][:, columns], expected.detach()), **found}


def markdown(cells: dict) -> str:
    """A table for each shape."""
    parts = []
    for name in dict.fromkeys(cell["shape"]["name"] for cell in cells.values()):
        found = {entry: cells[f"{name}/{entry}"] for entry in ENTRIES if f"{name}/{entry}" in cells}
        parts.append(f"{Shape(**next(iter(found.values()))['shape']).title}\n\n{rows(found)}")
    return "\n\n".join(parts) or "Nothing has been measured."


def rows(found: dict[str, dict]) -> str:
    lines = []
    for entry, cell in found.items():
        if "failure" in cell:
            lines.append([ENTRIES[entry][0], cell["failure"], *[""] * 4])
            continue
        both = cell["forward_backward"]
        peak = both["peak_bytes"]
        memory = ["", ""] if peak is None else [mebibytes(peak), mebibytes(peak - cell["gradient_bytes"])]
        worst = max((e for e in cell["errors"].values() if e is not None), default=float("nan"))
        lines.append([ENTRIES[entry][0], f"{cell['forward']['ms']:.3f}", f"{both['ms']:.3f}", *memory, f"{worst:.1e}"])
    header = ["", "forward, ms", "forward + backward, ms", "extra memory", "without the gradients", "largest error"]
    return table(header, lines)


def mebibytes(count: int) -> str:
    return f"{count / 2**20:,.0f} MiB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, RESULTS / "head.json", timeout=120)
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=[n for n in SHAPES if "tiny" not in n])
    parser.add_argument("--entries", nargs="+", choices=list(ENTRIES), default=list(ENTRIES))
    parser.add_argument("--sweep", action="store_true", help="time tile sizes of each kernel instead")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        serve(lambda cell: measure(SHAPES[cell["shape"]], cell["entry"], device))
        return
    if options.sweep:
        from benchmarks.operators.projection_sweep import sweep

        sweep(SHAPES["in-batch"])
        return
    results = Results(options, flat=True)
    if not options.render_only:
        if not torch.cuda.is_available() and any("tiny" not in name for name in options.shapes):
            raise SystemExit("These shapes need a CUDA GPU, and there is none; pass --shapes tiny.")
        for shape, entry in itertools.product(options.shapes, options.entries):
            if results.wants(name := f"{shape}/{entry}"):
                command = ["-m", "benchmarks.operators.projection", "--worker"]
                result = ask_apart(command, {"shape": shape, "entry": entry}, options.timeout)
                brief = {
                    key: value.get("ms", value) if isinstance(value, dict) else value for key, value in result.items()
                }
                brief.pop("environment", None)
                results.add(name, {"shape": dataclasses.asdict(SHAPES[shape]), **result}, brief)
    print("\n" + markdown(results.cells))


if __name__ == "__main__":
    main()
