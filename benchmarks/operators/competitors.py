"""Every way to compute MaxSim that the operator benchmark compares, each through its public functions.

A competitor may have several entries for one shape; the fastest counts. Inputs that a caller has anyway (lengths,
masks, packed copies, token batches) are made beforehand and not timed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from benchmarks.harness.timing import DEVICE
from benchmarks.operators.shapes import Shape
from pylate_fastmaxsim import TokenBatch, maxsim, reference

TITLES = {
    "fast": "pylate-fastmaxsim",
    "lik": "late-interaction-kernels",
    "flash": "flash-maxsim",
    "einsum": "einsum",
    "compile": "compiled einsum",
}


@dataclass(frozen=True)
class Inputs:
    """One set of random unit token vectors in every form that a competitor takes."""

    queries: Tensor  # [Nq, Lq, d]
    documents: Tensor  # [Nd, Ld, d], with own candidates [Nq, K, Ld, d]
    lengths: Tensor  # live tokens of each document, [number of documents], int32
    mask: Tensor | None  # [Nd, Ld], bool, for ragged documents only
    packed: Tensor | None  # [T, d], the live tokens back to back, for ragged documents only
    q_cu_seqlens: Tensor  # [Nq + 1], int32, of the queries back to back
    d_cu_seqlens: Tensor | None  # [Nd + 1], int32, of packed
    query_batch: TokenBatch
    document_batch: TokenBatch
    candidates: Tensor | None  # [Nq, K], int64

    def differentiable(self) -> Inputs:
        """The same memory as leaves of a graph."""
        queries, documents = (values.detach().requires_grad_() for values in (self.queries, self.documents))
        packed = None if self.packed is None else self.packed.detach().requires_grad_()
        rows = documents.flatten(0, -2) if packed is None else packed
        return replace(
            self,
            queries=queries,
            documents=documents,
            packed=packed,
            query_batch=self.query_batch.with_values(queries.flatten(0, 1)),
            document_batch=self.document_batch.with_values(rows),
        )


@dataclass(frozen=True)
class Entry:
    """One public function applied to :class:`Inputs`, and which form of the documents it differentiates."""

    name: str
    score: Callable[[Inputs], Tensor]
    differentiable: bool = True
    documents: str = "documents"
    masked: bool = True  # False: padding counts as tokens, to show its cost

    def leaves(self, inputs: Inputs) -> dict[str, Tensor]:
        return {"query": inputs.queries, "document": getattr(inputs, self.documents)}


def make_inputs(shape: Shape, seed: int) -> Inputs:
    generator = torch.Generator(DEVICE).manual_seed(seed)

    def vectors(*size: int) -> Tensor:
        values = torch.randn(*size, shape.dim, device=DEVICE, generator=generator)
        return torch.nn.functional.normalize(values, dim=-1).to(getattr(torch, shape.dtype))

    queries = vectors(shape.queries, shape.query_length)
    leading = (shape.queries, shape.documents) if shape.layout == "candidates" else (shape.documents,)
    documents = vectors(*leading, shape.document_length)
    lengths = torch.tensor(shape.lengths(), dtype=torch.int32, device=DEVICE)
    q_cu_seqlens = torch.arange(shape.queries + 1, dtype=torch.int32, device=DEVICE) * shape.query_length
    mask = packed = d_cu_seqlens = candidates = None
    document_batch = TokenBatch.from_padded(documents.flatten(0, -3))
    if shape.layout == "ragged":
        mask = torch.arange(shape.document_length, device=DEVICE) < lengths[:, None]
        packed = documents[mask]
        d_cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
        document_batch = TokenBatch.from_packed(packed, d_cu_seqlens, max_length=shape.document_length)
    if shape.layout == "candidates":
        candidates = torch.arange(shape.queries * shape.documents, device=DEVICE).view(shape.queries, shape.documents)
    forms = (lengths, mask, packed, q_cu_seqlens, d_cu_seqlens, TokenBatch.from_padded(queries), document_batch)
    return Inputs(queries, documents, *forms, candidates)


def exact_scores(entry: Entry, inputs: Inputs, rows: Tensor, columns: Tensor, exact: list[Tensor]) -> Tensor:
    """Scores of a few queries and documents by the definition, from leaves of an entry in float64."""
    queries = TokenBatch.from_padded(exact[0]).select(rows)
    if entry.documents == "packed":
        documents = inputs.document_batch.with_values(exact[1])
    else:
        documents = TokenBatch.from_padded(exact[1].flatten(0, -3), inputs.mask if entry.masked else None)
    if inputs.candidates is None:
        return reference.maxsim(queries, documents.select(columns))
    return reference.maxsim(queries, documents, inputs.candidates[rows][:, columns])


def fast_entries(shape: Shape) -> list[Entry]:
    batch = Entry(
        "maxsim of token batches",
        lambda x: maxsim(x.query_batch, x.document_batch, x.candidates),
        documents="packed" if shape.layout == "ragged" else "documents",
    )
    padded = Entry(
        "maxsim of padded tensors",
        lambda x: maxsim(x.queries, x.documents.flatten(0, -3), x.candidates, documents_mask=x.mask),
    )
    if shape.layout == "ragged":
        every = Entry("maxsim of all positions", lambda x: maxsim(x.queries, x.documents), masked=False)
        return [batch, padded, every]
    # Both run the same kernels; a sweep needs only one of them.
    return [batch] if shape.group in ("dimensions", "sweep") else [batch, padded]


def lik_entries(shape: Shape) -> list[Entry]:
    import late_interaction_kernels as lik

    entries = [Entry("maxsim", lambda x: lik.maxsim(x.queries, x.documents, d_mask=x.mask))]
    if shape.layout == "ragged":

        def varlen(x: Inputs) -> Tensor:
            return lik.maxsim_varlen(
                x.queries.flatten(0, 1),
                x.packed,
                x.q_cu_seqlens,
                x.d_cu_seqlens,
                max_seqlen_q=shape.query_length,
                max_seqlen_d=shape.document_length,
            )

        entries.append(Entry("maxsim_varlen", varlen, documents="packed"))
    return entries


def flash_entries(shape: Shape) -> list[Entry]:
    """Its packed functions take one query at a time and have no gradient, so batches are padded, with lengths."""
    import flash_maxsim as flash

    shared = shape.layout != "candidates"

    def options(x: Inputs) -> dict:
        return {"shared_docs": shared, "doc_lengths": x.lengths if shape.layout == "ragged" else None}

    def batched(x: Inputs, **more: object) -> Tensor:
        return flash.flash_maxsim_batched(x.queries, x.documents, **more, **options(x))

    def trained(x: Inputs) -> Tensor:
        return flash.flash_maxsim_batched_train(x.queries, x.documents, **options(x))

    def packed(x: Inputs) -> Tensor:
        one = (flash.flash_maxsim_packed(q, x.packed, x.d_cu_seqlens, max_seqlen_d=longest) for q in x.queries)
        return torch.stack(list(one))

    longest = shape.document_length
    entries = [
        Entry("flash_maxsim_batched", batched, False),
        # The default pads queries to 128 tokens, which takes most of the time of a short query.
        Entry("flash_maxsim_batched, pad_lq=False", lambda x: batched(x, pad_lq=False), False),
    ]
    if shape.backward:
        entries.append(Entry("flash_maxsim_batched_train", trained))
    if shape.queries == 1:
        entries.append(Entry("flash_maxsim", lambda x: flash.flash_maxsim(x.queries[0], x.documents)[None], False))
    if shape.layout == "ragged":
        entries.append(Entry("flash_maxsim_packed, query by query", packed, False, documents="packed"))
    return entries


def stock_formula(queries: Tensor, documents: Tensor, mask: Tensor | None) -> Tensor:
    """Einsum, maximum, sum, in the dtype of the vectors; masked tokens are left out."""
    equation = "qsh,qdth->qdst" if documents.dim() == 4 else "qsh,dth->qdst"
    similarities = torch.einsum(equation, queries, documents)
    if mask is not None:
        similarities = similarities.masked_fill(~mask[:, None, :], -torch.inf)
    # `max` as in PyLate: its gradient goes to one winner, that of `amax` is shared among equal ones.
    return similarities.max(dim=-1).values.sum(dim=-1)


def einsum_entries(shape: Shape) -> list[Entry]:
    return [Entry("einsum, max, sum", lambda x: stock_formula(x.queries, x.documents, x.mask))]


def compile_entries(shape: Shape) -> list[Entry]:
    torch.compiler.reset()
    compiled = torch.compile(stock_formula, dynamic=False, mode="max-autotune-no-cudagraphs")
    return [Entry("torch.compile(einsum, max, sum), max-autotune", lambda x: compiled(x.queries, x.documents, x.mask))]


ENTRIES: dict[str, Callable[[Shape], list[Entry]]] = {
    "fast": fast_entries,
    "lik": lik_entries,
    "flash": flash_entries,
    "einsum": einsum_entries,
    "compile": compile_entries,
}
