"""XTR scores, stock against this package: forward, forward + backward and peak memory, on one GPU.

    python -m benchmarks xtr                        # of PyLate
    python -m benchmarks xtr --host multi-vector --results benchmarks/results/multi_vector_xtr.json   # of Sentence Transformers 6
    python -m benchmarks xtr --only tiny --results /tmp/xtr.json     # a trial, also on a CPU

Embeddings are unit vectors. "random" ones are independent. "clustered" document tokens are close to each other and to
the query, which leaves more candidates for the k-th largest similarity. "collapsed" ones are so close that these
candidates overflow their buffer at first. A tenth of the document tokens is masked.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial

import torch
from torch import Tensor

import pylate_fastmaxsim
from benchmarks.harness.tables import table
from benchmarks.harness.timing import peak_bytes, time_calls
from benchmarks.harness.workers import failure

# The module with the scores of each host.
HOSTS = {"pylate": "pylate.scores", "multi-vector": "sentence_transformers.multi_vector_encoder.scoring"}


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


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--host", choices=list(HOSTS), default="pylate")


def cells(options: argparse.Namespace) -> dict[str, dict]:
    """The tiny shape only where there is no GPU."""
    shapes = [shape for shape in SHAPES if (shape.name == "tiny") != torch.cuda.is_available()]
    return {shape.name: {"shape": asdict(shape), "host": options.host} for shape in shapes}


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
    scores = importlib.import_module(HOSTS[host])
    return (scores.XTRKDScores if shape.own else scores.XTRScores)(shape.k)


def forward_backward(forward: Callable[[], Tensor], leaves: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    scores = forward()
    return torch.autograd.grad(scores, leaves, torch.ones_like(scores))


def measure(cell: dict) -> dict:
    """Both paths at one shape; a failure is a result."""
    shape, device = Shape(**cell["shape"]), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    queries, documents, mask = inputs(shape, device)
    forward = partial(metric_of(cell["host"], shape), queries, documents, documents_mask=mask)
    measures = {"forward": forward, "forward_backward": partial(forward_backward, forward, (queries, documents))}
    found: dict = {}
    for name in ("stock", "fast"):
        if name == "fast":
            pylate_fastmaxsim.enable()
        try:
            found[name] = {
                each: {**time_calls([call], device), "peak_bytes": peak_bytes(call, device)}
                for each, call in measures.items()
            }
        except Exception as error:  # noqa: BLE001 - a failure is a result
            found[name] = {"failure": failure(error)}
        finally:
            pylate_fastmaxsim.disable()
    return found


def markdown(content: dict) -> str:
    """Forward, forward + backward and memory of both, and the ratios of forward + backward."""
    lines = []
    for name, cell in content["cells"].items():
        entries, measured = [name], [cell[path].get("forward_backward") for path in ("stock", "fast")]
        for path, both in zip(("stock", "fast"), measured, strict=True):
            if both is None:
                entries.append(cell[path]["failure"])
                continue
            memory = "" if both["peak_bytes"] is None else f", {both['peak_bytes'] / 2**20:,.0f} MiB"
            entries.append(f"{cell[path]['forward']['ms']:.3f} / {both['ms']:.3f} ms{memory}")
        stock, fast = measured
        entries.append(f"{stock['ms'] / fast['ms']:.2f}x" if stock and fast else "")
        less = stock and fast and fast["peak_bytes"] and stock["peak_bytes"] / fast["peak_bytes"]
        lines.append([*entries, f"{less:.1f}x" if less else ""])
    return table(["shape", "stock", "this package", "speed", "less memory"], lines)
