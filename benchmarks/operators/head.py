"""From hidden states to MaxSim scores on one GPU: the fused projection against Linear, normalize and each peer.

    python -m benchmarks head                         # measure what is missing, then print the table
    python -m benchmarks head --render                # the table of the committed results
    python -m benchmarks head --only 'in-batch/*' --again
    python -m benchmarks head --only 'tiny/fast' 'tiny/einsum' --results /tmp/head.json   # a trial on a CPU

A cell is one implementation at one shape, in a process of its own: forward without gradient, forward + backward with
the gradients of queries, hidden states and weight, their memory, and their error against float64.
"""

from __future__ import annotations

import argparse
import itertools
from dataclasses import asdict

import torch

from benchmarks.harness.tables import table
from benchmarks.harness.timing import peak_bytes, time_calls
from benchmarks.operators.head_entries import ENTRIES, SHAPES, Inputs, Shape, make_inputs
from benchmarks.operators.measure import relative_error, spread


def cells(options: argparse.Namespace) -> dict[str, dict]:
    """Tiny shapes only where there is no GPU."""
    shapes = [shape for name, shape in SHAPES.items() if ("tiny" in name) != torch.cuda.is_available()]
    pairs = itertools.product(shapes, ENTRIES)
    return {f"{shape.name}/{entry}": {"shape": asdict(shape), "entry": entry} for shape, entry in pairs}


def measure(cell: dict) -> dict:
    """Times, memory and errors of one implementation at one shape."""
    shape, score = SHAPES[cell["shape"]["name"]], ENTRIES[cell["entry"]][1]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
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

    result: dict = {"gradient_bytes": sum(leaf.nbytes for leaf in inputs.leaves())}
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


def markdown(content: dict) -> str:
    """A table for each shape."""
    cells, parts = content["cells"], []
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
