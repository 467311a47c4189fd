"""XTR scores, stock against this package: forward, forward + backward and peak memory, on one GPU.

    python -m benchmarks.operators.xtr                        # of PyLate, written to results/xtr.json
    python -m benchmarks.operators.xtr --host multi-vector    # of Sentence Transformers 6, to results/multi_vector_xtr.json
    python -m benchmarks.operators.xtr --kernels              # where the time of the first shape goes, kernel by kernel
    python -m benchmarks.operators.xtr --sweep                # times of tile sizes at the first shape
    python -m benchmarks.operators.xtr --shapes tiny --output /tmp/xtr.json     # a trial of the command on a CPU

Embeddings are unit vectors. "random" ones are independent. "clustered" document tokens are close to each other and to
the query, which leaves more candidates for the k-th largest similarity. "collapsed" ones are so close that these
candidates overflow their buffer at first. A tenth of the document tokens is masked.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

import pylate_fastmaxsim
from benchmarks.harness.paths import RESULTS
from benchmarks.harness.records import environment, write
from benchmarks.harness.timing import peak_bytes, time_calls
from benchmarks.harness.workers import failure
from pylate_fastmaxsim import TokenBatch

# The module with the scores of each host, and its results file.
HOSTS = {
    "pylate": ("pylate.scores", "xtr.json"),
    "multi-vector": ("sentence_transformers.multi_vector_encoder.scoring", "multi_vector_xtr.json"),
}


@dataclass(frozen=True)
class Shape:
    """A batch of queries, each with ``ways`` documents; with ``own``, scored against these only (distillation)."""

    name: str
    queries: int
    ways: int
    document_length: int = 180
    query_length: int = 32
    dim: int = 128
    k: int = 256
    dtype: str = "bfloat16"
    own: bool = False
    embeddings: str = "random"


SHAPES = [
    Shape("in-batch", 256, 2),
    Shape("in-batch-clustered", 256, 2, embeddings="clustered"),
    Shape("in-batch-collapsed", 256, 2, embeddings="collapsed"),
    Shape("in-batch-64", 64, 2),
    Shape("in-batch-fp32", 256, 2, dtype="float32"),
    Shape("distillation", 32, 16, own=True),
    Shape("tiny", 3, 2, 9, 4, 8, 16, dtype="float32"),
]
# Tiles to try on sm_90, as in launch.py: ForwardTiles and CollectTiles.
MAXIMA = [(256, 64, 128, 8, 8, 2, None), (128, 64, 128, 8, 8, 2, None), (128, 64, 128, 4, 4, 3, None), (256, 64, 128, 4, 8, 2, None)]  # fmt: skip
COLLECT = [(128, 64, 8, 3), (128, 32, 8, 3), (64, 64, 4, 3), (64, 32, 4, 3), (128, 64, 8, 2), (256, 64, 8, 2), (128, 128, 8, 2)]  # fmt: skip


def inputs(shape: Shape, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Queries ``[Q, Lq, d]``, documents ``[Q, N, Ld, d]`` and the mask of the documents."""
    torch.manual_seed(0)
    queries = torch.randn(shape.queries, shape.query_length, shape.dim, device=device)
    documents = torch.randn(shape.queries, shape.ways, shape.document_length, shape.dim, device=device)
    if shape.embeddings == "clustered":
        documents = (
            0.7 * documents
            + queries[:, None, :1]
            + 0.3
            * queries.repeat_interleave(-(-shape.document_length // shape.query_length), dim=1)[
                :, None, : shape.document_length
            ]
        )
    if shape.embeddings == "collapsed":
        documents = documents + 4 * torch.randn_like(documents[:, :, :1])
    mask = torch.rand(documents.shape[:3], device=device) < 0.9
    vectors = (torch.nn.functional.normalize(each, dim=-1) for each in (queries, documents))
    queries, documents = (each.to(getattr(torch, shape.dtype)).requires_grad_() for each in vectors)
    return queries, documents, mask


def metric_of(host: str, shape: Shape) -> Callable[..., Tensor]:
    scores = importlib.import_module(HOSTS[host][0])
    return (scores.XTRKDScores if shape.own else scores.XTRScores)(shape.k)


def forward_backward(forward: Callable[[], Tensor], leaves: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    scores = forward()
    return torch.autograd.grad(scores, leaves, torch.ones_like(scores))


def measure(host: str, shape: Shape, device: torch.device) -> dict:
    """Both paths at one shape; a failure is a result."""
    queries, documents, mask = inputs(shape, device)
    forward = partial(metric_of(host, shape), queries, documents, documents_mask=mask)
    both = partial(forward_backward, forward, (queries, documents))
    row: dict = {"shape": asdict(shape)}
    for name in ("stock", "fast"):
        if name == "fast":
            pylate_fastmaxsim.enable()
        try:
            row[name] = {
                "forward": {**time_calls([forward], device), "peak_bytes": peak_bytes(forward, device)},
                "forward_backward": {**time_calls([both], device), "peak_bytes": peak_bytes(both, device)},
            }
        except Exception as error:  # noqa: BLE001 - a failure is a result
            row[name] = {"failure": failure(error)}
        finally:
            pylate_fastmaxsim.disable()
    return row


def line(row: dict) -> str:
    """A row for the terminal: forward, forward + backward, memory, and both ratios to stock."""
    cells = [f"{row['shape']['name']:20}"]
    for name in ("stock", "fast"):
        result = row[name]
        if "failure" in result:
            cells.append(f"{name}: {result['failure']}")
            continue
        both = result["forward_backward"]
        memory = "" if both["peak_bytes"] is None else f", {both['peak_bytes'] / 2**20:.0f} MiB"
        cells.append(f"{name}: {result['forward']['ms']:.3f} / {both['ms']:.3f} ms{memory}")
    if not any("failure" in row[name] for name in ("stock", "fast")):
        stock, fast = (row[name]["forward_backward"] for name in ("stock", "fast"))
        cells.append(f"{stock['ms'] / fast['ms']:.2f}x")
        if fast["peak_bytes"]:
            cells.append(f"{stock['peak_bytes'] / fast['peak_bytes']:.1f}x less memory")
    return "   ".join(cells)


def profile_kernels(host: str, shape: Shape, device: torch.device) -> None:
    """Print the time of every kernel of one forward + backward of this package, longest first."""
    queries, documents, mask = inputs(shape, device)
    forward = partial(metric_of(host, shape), queries, documents, documents_mask=mask)
    with pylate_fastmaxsim.enabled():
        call = partial(forward_backward, forward, (queries, documents))
        for _ in range(3):
            call()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            call()
            torch.cuda.synchronize()
    print(profiler.key_averages().table(sort_by="self_cuda_time_total", row_limit=25, max_name_column_width=60))


def sweep(shape: Shape, device: torch.device) -> None:
    """Time the forward with each choice of tiles, one kernel at a time, and compare results with the default tiles."""
    from pylate_fastmaxsim._operands import ScoringOperands
    from pylate_fastmaxsim.kernels.maxsim.tiles import ForwardTiles
    from pylate_fastmaxsim.kernels.xtr import launch as xtr_launch
    from pylate_fastmaxsim.kernels.xtr.tiles import CollectTiles, XtrTiles

    queries, documents, mask = inputs(shape, device)
    q = TokenBatch.from_padded(queries.detach())
    d = TokenBatch.from_padded(documents.detach().flatten(0, 1), mask.flatten(0, 1))
    arguments = (ScoringOperands.of(q, d), shape.k, False, True, "highest")
    expected = xtr_launch.forward(*arguments)
    choices = [XtrTiles()]
    choices += [XtrTiles(forward=ForwardTiles(*tiles)) for tiles in MAXIMA]
    choices += [XtrTiles(collect=CollectTiles(*tiles)) for tiles in COLLECT]
    for tiles in choices:
        call = partial(xtr_launch.forward, *arguments, tiles=tiles)
        try:
            same = all(itertools.starmap(torch.equal, zip(call(), expected, strict=True)))
            print(
                f"{time_calls([call], device)['ms']:8.3f} ms  {'same' if same else 'OTHER RESULT'}  {tiles}", flush=True
            )
        except Exception as error:  # noqa: BLE001 - a tile that does not fit
            print(f"       -     {tiles}: {failure(error)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [shape.name for shape in SHAPES]
    parser.add_argument("--shapes", nargs="+", choices=names, default=names[:-1])
    parser.add_argument("--host", choices=list(HOSTS), default="pylate")
    parser.add_argument("--output", type=Path, help="default: the host's file in results/")
    parser.add_argument("--kernels", action="store_true", help="profile the first of the shapes instead")
    parser.add_argument("--sweep", action="store_true", help="time tiles at the first of the shapes instead")
    options = parser.parse_args()
    shapes = [shape for shape in SHAPES if shape.name in options.shapes]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type != "cuda" and (options.kernels or options.sweep or options.shapes != ["tiny"]):
        raise SystemExit("This measures a CUDA GPU, and there is none; pass --shapes tiny for a trial.")
    if options.kernels:
        profile_kernels(options.host, shapes[0], device)
    elif options.sweep:
        sweep(shapes[0], device)
    else:
        rows = []
        for shape in shapes:
            rows.append(measure(options.host, shape, device))
            print(line(rows[-1]), flush=True)
        output = options.output or RESULTS / HOSTS[options.host][1]
        write(output, {"environment": environment(), "rows": rows})


if __name__ == "__main__":
    main()
