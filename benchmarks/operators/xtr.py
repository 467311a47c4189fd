"""XTR scores, stock against this package: forward, forward + backward and peak memory, on one GPU.

    python -m benchmarks xtr                        # of PyLate
    python -m benchmarks xtr --host multi-vector --results benchmarks/results/multi_vector_xtr.json   # of Sentence Transformers 6
    python -m benchmarks xtr --only tiny --results /tmp/xtr.json     # a trial, also on a CPU

Embeddings are random unit vectors. A tenth of the document tokens is masked.
"""

from __future__ import annotations

import argparse
import importlib
from dataclasses import asdict, dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import normalize

import pylate_fastmaxsim
from benchmarks.harness.timing import DEVICE
from benchmarks.operators.measure import timed

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


SHAPES = [
    Shape("in-batch", 256, 2),
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


def inputs(shape: Shape) -> tuple[Tensor, Tensor, Tensor]:
    """Queries ``[Q, Lq, d]``, documents ``[Q, N, Ld, d]`` and the mask of the documents."""
    torch.manual_seed(0)
    queries = torch.randn(shape.queries, shape.query_length, shape.dim, device=DEVICE)
    documents = torch.randn(shape.queries, shape.ways, shape.document_length, shape.dim, device=DEVICE)
    mask = torch.rand(documents.shape[:3], device=DEVICE) < 0.9
    vectors = (normalize(each, dim=-1).to(getattr(torch, shape.dtype)) for each in (queries, documents))
    return *(each.requires_grad_() for each in vectors), mask


def measure(cell: dict) -> dict:
    """Both paths at one shape; a failure is a result."""
    shape = Shape(**cell["shape"])
    queries, documents, mask = inputs(shape)
    module = importlib.import_module(HOSTS[cell["host"]])
    metric = (module.XTRKDScores if shape.own else module.XTRScores)(shape.k)
    forward = partial(metric, queries, documents, documents_mask=mask)
    measures = {"forward": [forward]}
    measures["forward_backward"] = [lambda: torch.autograd.grad(forward().sum(), (queries, documents))]
    found = {"stock": timed(measures)}
    with pylate_fastmaxsim.enabled():
        return found | {"fast": timed(measures)}
