"""All operators in one table: their calls, their definitions in float64, and problems of every awkward shape."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from pylate_fastmaxsim import (
    CompressedBatch,
    LogSumExp,
    Softmax,
    TokenBatch,
    TopK,
    compress,
    maxsim,
    maxsim_from_hidden,
    pooled_scores,
    reference,
    splade_pool,
    xtr_scores,
)
from pylate_fastmaxsim.compressed import Residual, rounded_queries
from pylate_fastmaxsim.ops.projection import project_normalize
from pylate_fastmaxsim.pooling import Pooling
from tests.support.ragged_batches import ragged
from tests.support.residual_codecs import random_codec

# float64 numbers that a definition holds at once.
AT_ONCE = 2**25


@dataclass(frozen=True, eq=False)
class Problem:
    """Arguments of a call. SPLADE's texts and what is projected are ``documents``, without queries."""

    queries: TokenBatch | None
    documents: TokenBatch | CompressedBatch
    candidates: Tensor | None = None
    zero_floor: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None

    @property
    def batches(self) -> dict[str, TokenBatch]:
        named = {"queries": self.queries, "documents": self.documents}
        return {name: batch for name, batch in named.items() if isinstance(batch, TokenBatch)}

    @property
    def leaves(self) -> dict[str, Tensor]:
        """Inputs that have a gradient, by name."""
        found = {name: batch.values for name, batch in self.batches.items()}
        return found | {name: getattr(self, name) for name in ("weight", "bias") if getattr(self, name) is not None}

    def with_leaves(self, leaves: dict[str, Tensor]) -> Problem:
        changes = {
            name: getattr(self, name).with_values(leaf) if name in self.batches else leaf
            for name, leaf in leaves.items()
        }
        return replace(self, **changes)

    def each(self, change: Callable[[Tensor], Tensor]) -> Problem:
        """Every tensor changed, but for those of compressed documents."""

        def changed(value: object) -> object:
            if isinstance(value, TokenBatch):
                return replace(value, **{name: changed(each) for name, each in vars(value).items()})
            return change(value) if isinstance(value, Tensor) else value

        return replace(self, **{name: changed(value) for name, value in vars(self).items()})

    def to(self, device: str) -> Problem:
        moved = self.each(lambda tensor: tensor.to(device))
        return moved if isinstance(self.documents, TokenBatch) else replace(moved, documents=self.documents.to(device))

    def exact(self) -> Problem:
        """In float64, with zeros for NaN: definitions leave out what does not count."""
        return self.with_leaves({name: leaf.detach().double().nan_to_num() for name, leaf in self.leaves.items()})

    def parts(self) -> Iterator[tuple[slice, Problem]]:
        """Problems of some rows of the result each."""
        if self.queries is None:
            yield slice(None), self
            return
        slots = len(self.documents) if self.candidates is None else self.candidates.shape[1]
        step = max(
            1, AT_ONCE // max(1, slots * self.documents.max_length * (self.queries.max_length + self.queries.dim))
        )
        for first in range(0, max(1, len(self.queries)), step):
            rows = slice(first, first + step)
            chosen = torch.arange(len(self.queries), device=self.documents.device)[rows]
            candidates = None if self.candidates is None else self.candidates[rows]
            yield rows, replace(self, queries=self.queries.select(chosen), candidates=candidates)


class Operator(NamedTuple):
    """``clear(problem, gap)``: which results have winners that differences of similarities below the gap do not change."""

    call: Callable[[Problem], Tensor]
    definition: Callable[[Problem], Tensor]
    clear: Callable[[Problem, float], Tensor | None]
    # Tolerances are multiplied with these, of float32 and of 16-bit vectors.
    slack: tuple[float, float] = (1.0, 1.0)
    # Scores that jump where a token passes or does not are compared where they are clear.
    jumps: bool = False


def similarities(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """``[Nq, P, Lq, Ld]``, and which query tokens and document tokens of them are live."""
    queries, q_live = problem.queries.to_padded()
    documents, d_live = problem.documents.to_padded()
    if problem.candidates is None:
        return torch.einsum("qsh,dth->qdst", queries, documents), q_live, d_live[None, :, None]
    documents, d_live = documents[problem.candidates], d_live[problem.candidates][:, :, None]
    return torch.einsum("qsh,qdth->qdst", queries, documents), q_live, d_live


def _close(values: Tensor, k: int, gap: float) -> Tensor:
    """Whether the k-th and the next largest are nearly equal."""
    if k >= values.shape[-1]:
        return torch.zeros(values.shape[:-1], dtype=torch.bool, device=values.device)
    best = values.topk(k + 1, dim=-1).values
    return best[..., k - 1] - best[..., k] <= gap


def clear_winners(k: int = 1) -> Callable[[Problem, float], Tensor]:
    def clear(problem: Problem, gap: float) -> Tensor:
        values, q_live, d_live = similarities(problem)
        values = values.masked_fill(~d_live, -torch.inf)
        close = _close(values, k, gap)
        if problem.zero_floor is not None and values.numel():
            floor = problem.zero_floor if problem.candidates is None else problem.zero_floor[problem.candidates]
            close |= floor.expand(close.shape[:2])[..., None] & (values.amax(dim=-1).abs() <= gap)
        return ~(close & q_live[:, None]).any(dim=-1)

    return clear


def _clear_xtr(k: int) -> Callable[[Problem, float], Tensor]:
    def clear(problem: Problem, gap: float) -> Tensor:
        everywhere, q_live, all_live = similarities(replace(problem, candidates=None))
        everywhere = everywhere.masked_fill(~all_live, -torch.inf).transpose(1, 2).flatten(2)
        values, _, d_live = similarities(problem)
        values = values.masked_fill(~d_live, -torch.inf)
        close = _close(values, 1, gap)
        if values.numel():
            best = values.amax(dim=-1)
            close |= best.abs() <= gap
            if k <= everywhere.shape[-1]:
                threshold = everywhere.topk(k, dim=-1).values[:, None, :, -1]
                near = (best - threshold).abs() <= gap
                close |= near & ((best != threshold) | _close(everywhere, k, gap)[:, None])
        return ~(close & q_live[:, None]).any(dim=-1)

    return clear


def _clear_splade(problem: Problem, gap: float) -> Tensor:
    hidden, live = problem.documents.to_padded()
    logits = torch.einsum("ntd,vd->nvt", hidden, problem.weight)
    logits = logits + (0 if problem.bias is None else problem.bias[:, None])
    logits = logits.masked_fill(~live[:, None], -torch.inf)
    close = _close(logits, 1, gap)
    return ~(close | (logits.amax(dim=-1).abs() <= gap)) if logits.numel() else ~close


def _clear_compressed(problem: Problem, gap: float) -> Tensor:
    queries, documents = problem.queries, problem.documents.decompress(torch.float64)
    if problem.documents.format != "residual":
        values, scales = rounded_queries(queries.values.float(), problem.documents.format)
        queries = queries.with_values(values.double() * scales.double()[:, None])
    return clear_winners()(replace(problem, queries=queries, documents=documents), gap)


def _all_clear(problem: Problem, gap: float) -> None:
    return None


def pooled(pooling: Pooling) -> Operator:
    return Operator(
        lambda p: pooled_scores(p.queries, p.documents, p.candidates, pooling=pooling),
        lambda p: reference.pooled_scores(p.queries, p.documents, p.candidates, pooling=pooling),
        clear_winners(pooling.k) if isinstance(pooling, TopK) else _all_clear,
        # Weights of 16-bit rows are rounded to bf16.
        (2.0, 1.5 if isinstance(pooling, TopK) else 100.0),
    )


def xtr(k: int, normalizer: str = "positive") -> Operator:
    def of(function: Callable) -> Callable[[Problem], Tensor]:
        def score(p: Problem) -> Tensor:
            floor = p.zero_floor if normalizer == "positive" else None
            return function(p.queries, p.documents, k, p.candidates, zero_floor=floor, normalizer=normalizer)

        return score

    return Operator(of(xtr_scores), of(reference.xtr_scores), _clear_xtr(k), (2.0, 1.0), jumps=True)


def splade(activation_function: str | None, log1p: bool) -> Operator:
    options = {"activation_function": activation_function, "log1p": log1p}
    return Operator(
        lambda p: splade_pool(p.documents, p.weight, p.bias, **options),
        lambda p: reference.splade_pool(p.documents, p.weight, p.bias, **options),
        _clear_splade,
        (1.0, 2.0),
    )


def projection(normalize: bool = True) -> Operator:
    return Operator(
        lambda p: project_normalize(p.documents.values, p.weight, p.bias, normalize),
        lambda p: reference.project(p.documents.values, p.weight, p.bias, normalize),
        _all_clear,
        (1.0, 300.0),  # the result is rounded
    )


def from_hidden(project: str, normalize: bool = True) -> Operator:
    def score(p: Problem) -> Tensor:
        options = {"project": project, "zero_floor": p.zero_floor}
        return maxsim_from_hidden(p.queries, p.documents, p.weight, p.bias, normalize, p.candidates, **options)

    def projected(p: Problem) -> Problem:
        sides = {
            side: batch.with_values(reference.project(batch.values, p.weight, p.bias, normalize))
            for side, batch in p.batches.items()
            if project in (side, "both")
        }
        return replace(p, **sides)

    def definition(p: Problem) -> Tensor:
        p = projected(p)
        return reference.maxsim(p.queries, p.documents, p.candidates, p.zero_floor)

    return Operator(score, definition, lambda p, gap: clear_winners()(projected(p), gap), (2.0, 300.0))


def compressed(format: str) -> Operator:
    # GPUs add products of e4m3 with fewer bits, which shows where similarities of both signs cancel.
    slack = {"int8": (1.0, 1.0), "fp8": (60.0, 15.0), "residual": (1.0, 50.0)}[format]
    return Operator(
        lambda p: maxsim(p.queries, p.documents, p.candidates),
        lambda p: reference.compressed_maxsim(p.queries, p.documents, p.candidates),
        _clear_compressed,
        slack,
    )


OPERATORS = {
    "maxsim": Operator(
        lambda p: maxsim(p.queries, p.documents, p.candidates, zero_floor=p.zero_floor),
        lambda p: reference.maxsim(p.queries, p.documents, p.candidates, p.zero_floor),
        clear_winners(),
    ),
    **{f"top {k}": pooled(TopK(k)) for k in (2, 3, 4, 5, 7, 9, 16, 40, 64)},
    **{f"softmax {t}": pooled(Softmax(t)) for t in (0.2, 1.0, 4.0)},
    "log-sum-exp": pooled(LogSumExp(0.5)),
    **{f"xtr {k}": xtr(k) for k in (1, 2, 5, 12, 30, 100, 256, 5000)},
    **{f"xtr {k}, retrieved": xtr(k, "retrieved") for k in (1, 5, 30, 100, 5000)},
    "splade": splade("relu", True),
    "splade, two logs": splade("log1p_relu", True),
    "splade, relu": splade("relu", False),
    "splade, maxima": splade(None, False),
    "project": projection(),
    "project, any length": projection(False),
    **{f"from hidden {side}": from_hidden(side) for side in ("documents", "queries", "both")},
    "from hidden, any length": from_hidden("both", False),
    **{format: compressed(format) for format in ("int8", "fp8", "residual")},
}
FORMATS = ("int8", "int8 by token", "fp8", "residual 4", "residual 2", "residual 1", "plaid")


def compressed_as(batch: TokenBatch, format: str) -> CompressedBatch:
    """A batch in one of FORMATS; "plaid" is of 4 bits and without norms."""
    if not format.startswith(("residual", "plaid")):
        return compress(batch, format.split()[0], per_token="token" in format)
    bits = int(format.split()[1]) if " " in format else 4
    documents = compress(batch, random_codec(batch.dim, bits).to(batch.device))
    if format != "plaid":
        return documents
    tokens = documents.tokens
    return replace(documents, tokens=Residual(tokens.codes.long(), tokens.packed, None, tokens.codec))


def problem(
    operator: str,
    seed: int = 0,
    *,
    dim: int = 16,
    dtype: torch.dtype = torch.float32,
    queries: tuple[int, ...] = (5, 5, 3, 0, 5),
    documents: tuple[int, ...] = (7, 0, 20, 3, 9, 1),
    masked: bool = True,
    gapless: bool = False,
    integers: bool = False,
    layout: str = "all",
    slots: int = 2,
    floor: bool = False,
    hidden: int = 24,
    rows: int = 70,
    bias: bool = True,
    bias_mean: float = -1.0,
    bias_dtype: torch.dtype | None = None,
    format: str | None = None,
    device: str = "cpu",
) -> Problem:
    """A problem of an operator of the table.

    Queries and documents are given by their lengths. ``layout``: "all", "shared" candidates, or "own": each document is that of
    one query. ``hidden``: size of what is projected. ``rows``: of the output embedding, whose bias has the mean
    ``bias_mean``: it decides how many values are positive.
    """
    generator = torch.Generator().manual_seed(seed)

    def batch(lengths: tuple[int, ...], dim: int, of: torch.dtype = dtype) -> TokenBatch:
        return ragged(generator, list(lengths), dim, of, integers, masked, gapless)

    def matrix(*shape: int) -> Tensor:
        numbers = (
            torch.randint(-2, 3, shape, generator=generator) if integers else torch.randn(shape, generator=generator)
        )
        return numbers.to(dtype)

    kind = operator.partition(",")[0].partition(" ")[0]
    if kind in ("splade", "project"):
        rows = rows if kind == "splade" else dim
        wide = dim if kind == "splade" else hidden
        of_bias = bias_dtype or (torch.promote_types(dtype, torch.float32) if kind == "splade" else dtype)
        offset = (matrix(rows).float() + round(bias_mean)).to(of_bias)
        texts = batch(documents, wide)
        if kind == "project":
            texts = texts.with_values(texts.values.nan_to_num())
        return Problem(None, texts, weight=matrix(rows, wide), bias=offset if bias else None).to(device)
    projected = {"documents": ("documents",), "queries": ("queries",)}.get(
        operator.rpartition(" ")[2], ("queries", "documents")
    )
    sizes = {side: hidden if kind == "from" and side in projected else dim for side in ("queries", "documents")}
    q = batch(queries, sizes["queries"])
    d = batch(documents, sizes["documents"], torch.float32 if kind in ("int8", "fp8", "residual") else dtype)
    candidates = zero_floor = None
    if layout == "shared":
        candidates = torch.randint(max(1, len(d)), (len(q), slots), generator=generator)
    elif layout == "own":
        candidates = torch.randperm(len(d), generator=generator)[: len(q) * slots].view(len(q), slots)
    if floor:
        zero_floor = torch.rand(len(d), generator=generator) < 0.5
    if kind in ("int8", "fp8", "residual"):
        d = compressed_as(d, format or {"residual": "residual 4"}.get(kind, kind))
    head = (matrix(dim, hidden), matrix(dim) if bias else None) if kind == "from" else (None, None)
    return Problem(q, d, candidates, zero_floor, *head).to(device)


def lengths(seed: int, count: int, longest: int) -> tuple[int, ...]:
    """Of sequences, of which the first is the longest and some have one token or none."""
    drawn = torch.randint(1, longest + 1, (count,), generator=torch.Generator().manual_seed(seed))
    drawn[1::7], drawn[2::7] = 0, 1
    drawn[0] = longest
    return tuple(drawn.tolist())
