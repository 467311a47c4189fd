"""The implementations that the projection benchmark compares, and their inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.operators.competitors import stock_formula
from pylate_fastmaxsim import maxsim, maxsim_from_hidden


@dataclass(frozen=True)
class Shape:
    """Nq queries of Lq unit vectors against Nd documents of Ld hidden states, or K for each query (``candidates``).

    With ``autocast`` hidden states and weights are float32 and the computation bfloat16, as in training.
    """

    name: str
    queries: int
    query_length: int
    documents: int
    document_length: int
    dim_in: int = 768
    dim: int = 128
    dtype: str = "bfloat16"
    autocast: bool = False
    candidates: bool = False

    @property
    def title(self) -> str:
        documents = f"{self.queries} x {self.documents}" if self.candidates else f"{self.documents}"
        size = f"{self.queries} x {self.query_length} against {documents} x {self.document_length}"
        return f"{size}, d_model = {self.dim_in}, d = {self.dim}, {self.dtype}" + ", autocast" * self.autocast


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("tiny", 3, 4, 5, 8, 32, 16, "float32"),
        Shape("tiny-candidates", 3, 4, 2, 8, 32, 16, "float32", candidates=True),
        Shape("in-batch", 256, 32, 512, 300),
        Shape("in-batch-autocast", 256, 32, 512, 300, autocast=True),
        Shape("in-batch-small", 128, 32, 256, 180),
        Shape("kd", 64, 32, 32, 180, candidates=True),
        Shape("fp32", 128, 32, 256, 180, dtype="float32"),
        Shape("wide", 128, 32, 256, 180, dim_in=2048, dim=1024),
    )
}


@dataclass(frozen=True)
class Inputs:
    """Unit vectors [Nq, Lq, d], hidden states [Nd, Ld, d_model] or [Nq, K, Ld, d_model], weight [d, d_model]."""

    queries: Tensor
    hidden: Tensor
    weight: Tensor

    def leaves(self) -> list[Tensor]:
        return [self.queries, self.hidden, self.weight]


def make_inputs(shape: Shape, device: torch.device, seed: int) -> Inputs:
    generator = torch.Generator(device).manual_seed(seed)
    dtype = getattr(torch, shape.dtype)
    leading = (shape.queries, shape.documents) if shape.candidates else (shape.documents,)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, device=device, generator=generator)

    queries = F.normalize(normal(shape.queries, shape.query_length, shape.dim), dim=-1).to(dtype)
    wide = torch.float32 if shape.autocast else dtype
    hidden = normal(*leading, shape.document_length, shape.dim_in).to(wide)
    weight = (normal(shape.dim, shape.dim_in) / shape.dim_in**0.5).to(wide)
    return Inputs(*(tensor.requires_grad_() for tensor in (queries, hidden, weight)))


def _own_candidates(x: Inputs) -> Tensor | None:
    if x.hidden.dim() == 3:
        return None
    return torch.arange(x.hidden.shape[0] * x.hidden.shape[1], device=x.hidden.device).view(x.hidden.shape[:2])


def fused(x: Inputs) -> Tensor:
    hidden = x.hidden.flatten(0, -3)
    return maxsim_from_hidden(x.queries, hidden, x.weight, candidates=_own_candidates(x))


def projected(x: Inputs) -> Tensor:
    """Normalised projections, as in PyLate, in the dtype of the queries."""
    return F.normalize(F.linear(x.hidden, x.weight), dim=-1).to(x.queries.dtype)


def unfused(x: Inputs) -> Tensor:
    return maxsim(x.queries, projected(x).flatten(0, -3), _own_candidates(x))


def lik(x: Inputs) -> Tensor:
    import late_interaction_kernels

    return late_interaction_kernels.maxsim(x.queries, projected(x))


def lik_fused(x: Inputs) -> Tensor:
    from late_interaction_kernels.fused_head import maxsim_from_hidden as peer

    if x.hidden.dim() == 4:
        raise ValueError("its fused head takes no candidates")
    return peer(x.queries, x.hidden, x.weight)


def flash(x: Inputs) -> Tensor:
    import flash_maxsim

    return flash_maxsim.flash_maxsim_batched_train(x.queries, projected(x), shared_docs=x.hidden.dim() == 3)


def einsum(x: Inputs) -> Tensor:
    return stock_formula(x.queries, projected(x), None)


ENTRIES: dict[str, tuple[str, Callable[[Inputs], Tensor]]] = {
    "fast": ("pylate-fastmaxsim, fused head", fused),
    "fast-unfused": ("Linear, normalize, pylate-fastmaxsim", unfused),
    "lik": ("Linear, normalize, late-interaction-kernels", lik),
    "flash": ("Linear, normalize, flash-maxsim", flash),
    "einsum": ("Linear, normalize, einsum", einsum),
    "lik-fused": ("late-interaction-kernels, fused head", lik_fused),
}
