"""Backward time of MaxSim against the share of pairs that gradient filtering keeps, on one GPU.

    python -m benchmarks.operators.grad_filter

Queries and documents are random unit vectors. A share of each query's score gradients is 1 and the rest far below the
bound, so that exactly this share is kept. The time of the filter is part of the backward.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from benchmarks.harness.paths import RESULTS
from benchmarks.harness.records import environment, write
from benchmarks.harness.timing import time_calls
from pylate_fastmaxsim import maxsim

QUERIES, QUERY_LENGTH, DOCUMENTS, DOCUMENT_LENGTH, DIM = 256, 32, 512, 300, 128
SHARES = (1.0, 0.5, 0.25, 0.125, 0.0625, 0.03125, 1 / DOCUMENTS)


def measure(device: torch.device) -> list[dict]:
    """Milliseconds of the backward without the filter and with it, for each share of pairs kept."""

    def vectors(count: int, length: int) -> torch.Tensor:
        values = torch.nn.functional.normalize(torch.randn(count, length, DIM, device=device), dim=-1)
        return values.bfloat16().requires_grad_()

    queries, documents = vectors(QUERIES, QUERY_LENGTH), vectors(DOCUMENTS, DOCUMENT_LENGTH)
    rows = []
    for share in SHARES:
        weight = (torch.rand(QUERIES, DOCUMENTS, device=device).argsort(dim=1) < round(share * DOCUMENTS)).float()
        weight = weight.clamp_min(1e-9)
        row = {"share": share}
        for name, grad_filter in (("all", None), ("filtered", "auto")):
            scores = maxsim(queries, documents, grad_filter=grad_filter)

            def backward(scores: torch.Tensor = scores, weight: torch.Tensor = weight) -> None:
                torch.autograd.grad(scores, (queries, documents), weight, retain_graph=True)

            row[name] = time_calls([backward], device)["ms"]
        rows.append(row)
        print(
            f"{share:8.2%} kept: {row['all']:.3f} ms without the filter, {row['filtered']:.3f} ms with it", flush=True
        )
    return rows


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("This measures a CUDA GPU, and there is none.")
    torch.manual_seed(0)
    shape = f"{QUERIES} x {QUERY_LENGTH} against {DOCUMENTS} x {DOCUMENT_LENGTH}, d = {DIM}, bfloat16"
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS / "grad_filter.json"
    content = {"shape": shape, "environment": environment(), "rows": measure(torch.device("cuda"))}
    write(target, content)


if __name__ == "__main__":
    main()
