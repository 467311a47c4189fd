"""From hidden states to MaxSim scores on one GPU: the fused projection against Linear, normalize and each peer.

    python -m benchmarks head                         # measure what is missing, then print the table
    python -m benchmarks head --only 'in-batch/*' --again
    python -m benchmarks head --only 'tiny/fast*' --results /tmp/head.json   # a trial on a CPU

A cell is one implementation at one shape, in a process of its own: forward without gradient, forward + backward with
the gradients of queries, hidden states and weight, their memory, and their error against float64.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from dataclasses import asdict, dataclass
from operator import attrgetter

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.harness.timing import DEVICE
from benchmarks.operators.competitors import stock_formula
from benchmarks.operators.measure import errors, forward_calls, gradient_calls, spread, timed
from pylate_fastmaxsim import maxsim, maxsim_from_hidden


@dataclass(frozen=True)
class Shape:
    """With ``autocast`` hidden states and weights are float32 and the computation bfloat16, as in training."""

    name: str
    queries: int
    query_length: int
    documents: int
    document_length: int
    dim_in: int = 768
    dim: int = 128
    dtype: str = "bfloat16"
    autocast: bool = False


SHAPES = (
    Shape("tiny", 3, 4, 5, 8, 32, 16, "float32"),
    Shape("in-batch", 256, 32, 512, 300),
    Shape("in-batch-autocast", 256, 32, 512, 300, autocast=True),
)


@dataclass(frozen=True)
class Inputs:
    """Unit vectors [Nq, Lq, d], hidden states [Nd, Ld, d_model], weight [d, d_model]."""

    queries: Tensor
    hidden: Tensor
    weight: Tensor

    @property
    def leaves(self) -> dict[str, Tensor]:
        return {"query": self.queries, "hidden": self.hidden, "weight": self.weight}

    @property
    def projected(self) -> Tensor:
        """Normalised projections, as in PyLate, in the dtype of the queries."""
        return F.normalize(F.linear(self.hidden, self.weight), dim=-1).to(self.queries.dtype)


def make_inputs(shape: Shape) -> Inputs:
    generator, dtype = torch.Generator(DEVICE).manual_seed(0), getattr(torch, shape.dtype)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, device=DEVICE, generator=generator)

    wide = torch.float32 if shape.autocast else dtype
    queries = F.normalize(normal(shape.queries, shape.query_length, shape.dim), dim=-1).to(dtype)
    hidden = normal(shape.documents, shape.document_length, shape.dim_in).to(wide)
    weight = (normal(shape.dim, shape.dim_in) / shape.dim_in**0.5).to(wide)
    return Inputs(*(tensor.requires_grad_() for tensor in (queries, hidden, weight)))


def fused(x: Inputs) -> Tensor:
    return maxsim_from_hidden(x.queries, x.hidden, x.weight)


def unfused(x: Inputs) -> Tensor:
    return maxsim(x.queries, x.projected)


def lik(x: Inputs) -> Tensor:
    import late_interaction_kernels

    return late_interaction_kernels.maxsim(x.queries, x.projected)


def lik_fused(x: Inputs) -> Tensor:
    from late_interaction_kernels.fused_head import maxsim_from_hidden as peer

    return peer(x.queries, x.hidden, x.weight)


def flash(x: Inputs) -> Tensor:
    import flash_maxsim

    return flash_maxsim.flash_maxsim_batched_train(x.queries, x.projected, shared_docs=True)


ENTRIES: dict[str, Callable[[Inputs], Tensor]] = {
    "fast": fused,
    "fast-unfused": unfused,
    "lik": lik,
    "flash": flash,
    "lik-fused": lik_fused,
}


def cells(options: argparse.Namespace) -> dict[str, dict]:
    """Tiny shapes only where there is no GPU."""
    shapes = [shape for shape in SHAPES if ("tiny" in shape.name) != torch.cuda.is_available()]
    pairs = itertools.product(shapes, ENTRIES)
    return {f"{shape.name}/{entry}": {"shape": asdict(shape), "entry": entry} for shape, entry in pairs}


def measure(cell: dict) -> dict:
    """Times, memory and errors of one implementation at one shape."""
    shape, score = Shape(**cell["shape"]), ENTRIES[cell["entry"]]
    inputs = make_inputs(shape)
    rows, columns = spread(shape.queries, 4), spread(shape.documents, 8)

    def scored(x: Inputs) -> Tensor:
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=shape.autocast):
            return score(x)

    def definition(exact: list[Tensor]) -> Tensor:
        return stock_formula(exact[0][rows], F.normalize(F.linear(exact[1][columns], exact[2]), dim=-1), None)

    found = {"forward": forward_calls(scored, [inputs])}
    found = timed(found | {"forward_backward": gradient_calls(scored, [inputs], attrgetter("leaves"))})
    found["errors"] = errors(scored(inputs), inputs.leaves, definition, (rows[:, None], columns))
    return {"gradient_bytes": sum(leaf.nbytes for leaf in inputs.leaves.values()), **found}
