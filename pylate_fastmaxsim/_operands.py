"""Operands of scores, as raw tensors and sizes: one argument from the operators down to the kernels."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import SymInt, Tensor

from pylate_fastmaxsim.tokens import TokenBatch


def _num_slots(operands: ScoringOperands | CompressedOperands) -> int:
    """Number P of scores of a query: of candidates, or of all documents."""
    return operands.d_starts.shape[0] if operands.candidates is None else operands.candidates.shape[1]


class ScoringOperands(NamedTuple):
    """Queries, documents and which pairs of them are scored.

    The fields of queries and documents are those of a :class:`~pylate_fastmaxsim.TokenBatch`. ``candidates`` is int64
    ``[Nq, K]`` or None for all documents, and ``zero_floor`` bool ``[Nd]`` or None. In a registered operator the fields
    are arguments of their own, so that PyTorch sees each tensor. Sizes may be symbolic in a graph.
    """

    q_values: Tensor
    q_starts: Tensor
    q_lengths: Tensor
    q_keep: Tensor | None
    d_values: Tensor
    d_starts: Tensor
    d_lengths: Tensor
    d_keep: Tensor | None
    candidates: Tensor | None
    zero_floor: Tensor | None
    max_q_length: int | SymInt
    max_d_length: int | SymInt
    q_gapless: bool
    d_gapless: bool

    @classmethod
    def of(
        cls,
        queries: TokenBatch,
        documents: TokenBatch,
        candidates: Tensor | None = None,
        zero_floor: Tensor | None = None,
    ) -> ScoringOperands:
        """The operands of two ragged batches."""
        return cls(
            queries.values, queries.starts, queries.lengths, queries.keep,
            documents.values, documents.starts, documents.lengths, documents.keep,
            candidates, zero_floor, queries.max_length, documents.max_length, queries.gapless, documents.gapless,
        )  # fmt: skip

    num_slots = property(_num_slots)


class PoolingNumbers(NamedTuple):
    """A pooling other than the maximum as kernels take it: top-k where ``k`` is not 0, else softmax or log-sum-exp."""

    k: int
    temperature: float
    log_sum_exp: bool


class CompressedOperands(NamedTuple):
    """Queries, compressed documents and which pairs of them are scored.

    ``stored`` is int8 or e4m3 ``[T, d]``, or uint8 ``[T, d * bits / 8]`` of residual codes, to which ``codes`` (integers
    ``[T]``), ``centroids`` (float16 ``[C, d]``) and ``byte_values`` (float16 ``[256, 8 / bits]``) belong. ``scales`` are
    float32 ``[T]`` (``per_token``) or ``[Nd]``, and ``scale`` is that of e4m3.
    """

    q_values: Tensor
    q_starts: Tensor
    q_lengths: Tensor
    q_keep: Tensor | None
    stored: Tensor
    scales: Tensor | None
    codes: Tensor | None
    centroids: Tensor | None
    byte_values: Tensor | None
    d_starts: Tensor
    d_lengths: Tensor
    d_keep: Tensor | None
    candidates: Tensor | None
    max_q_length: int | SymInt
    max_d_length: int | SymInt
    q_gapless: bool
    per_token: bool
    scale: float

    d_gapless = False

    @property
    def d_values(self) -> Tensor:
        """As many vectors as are stored, of which only the number is read."""
        return self.q_values.new_empty(1, 1).expand(self.stored.shape[0], 1)

    @property
    def format(self) -> str:
        """``"int8"``, ``"fp8"`` or ``"residual"``."""
        return {torch.int8: "int8", torch.float8_e4m3fn: "fp8", torch.uint8: "residual"}[self.stored.dtype]

    @property
    def bits(self) -> int:
        """Bits of a number of a residual, 8 of other formats."""
        return 8 if self.byte_values is None else 8 // self.byte_values.shape[1]

    num_slots = property(_num_slots)


class Texts(NamedTuple):
    """Which rows see which keys: the arguments of :func:`~pylate_fastmaxsim.ops.encoder.attention.text_attention` behind vectors."""

    cu_seqlens: Tensor
    key_cu_seqlens: Tensor
    max_length: int | SymInt
    scale: float
    reach: int
    seed: Tensor | None = None
    dropout: float = 0.0


class SpladeOperands(NamedTuple):
    """Hidden states of N texts, the output embedding of V vocabulary rows, and what comes after the maximum.

    The fields of the texts are those of a :class:`~pylate_fastmaxsim.TokenBatch`. ``weight`` is ``[V, d]``, ``bias``
    ``[V]`` or None. ``rectified``: relu after the maximum; ``logs``: how often log1p follows it, 0 to 2.
    """

    hidden: Tensor
    starts: Tensor
    lengths: Tensor
    keep: Tensor | None
    weight: Tensor
    bias: Tensor | None
    max_length: int | SymInt
    gapless: bool
    rectified: bool
    logs: int
