"""MaxSim over compressed documents as an operator, registered with torch.library and differentiable in the queries.

And MaxSim over documents that only its backward keeps compressed.
"""

from functools import partial
from typing import Literal

import torch
from torch import Tensor

from pylate_fastmaxsim._operands import CompressedOperands, ScoringOperands
from pylate_fastmaxsim.compressed import CompressedBatch, Fp8, Int8, Residual, rounded_queries
from pylate_fastmaxsim.cpu import compressed as blocked
from pylate_fastmaxsim.ops.operands import (
    cast_by_autocast,
    check_candidates,
    check_numbers,
    computed,
    fake_scores,
    kernels,
    recording,
    refuse_transforms,
    require_one_device_and_dim,
    require_vector_dtype,
    runs_kernels,
)
from pylate_fastmaxsim.ops.registered import Operator, differentiable
from pylate_fastmaxsim.tokens import TokenBatch, Tokens, as_batch

SavedDocuments = Literal["int8"] | None


def compressed_scores(
    queries: Tokens,
    documents: CompressedBatch,
    candidates: Tensor | None = None,
    queries_mask: Tensor | None = None,
) -> Tensor:
    """:func:`pylate_fastmaxsim.maxsim` for documents that are compressed."""
    operands = _prepared(as_batch("maxsim", "queries", queries, queries_mask), documents, candidates)
    scores, _ = _scores_and_winners(operands, recording("maxsim", operands))
    return scores


def _prepared(queries: TokenBatch, documents: CompressedBatch, candidates: Tensor | None) -> CompressedOperands:
    """The arguments of a call after all checks."""
    refuse_transforms("maxsim")
    q_values, tokens = queries.values, documents.tokens
    if isinstance(tokens, Residual):
        (q_values,) = cast_by_autocast(q_values)
    require_vector_dtype("maxsim", "token vectors", q_values)
    require_one_device_and_dim("maxsim", queries, documents)
    check_candidates("maxsim", queries, documents, candidates, None)
    return CompressedOperands(
        q_values, queries.starts, queries.lengths, queries.keep,
        *_stored(tokens), documents.starts, documents.lengths, documents.keep, candidates,
        queries.max_length, documents.max_length, queries.gapless,
        isinstance(tokens, Int8) and tokens.per_token, tokens.scale if isinstance(tokens, Fp8) else 1.0,
    )  # fmt: skip


def _stored(tokens: Int8 | Fp8 | Residual) -> tuple[Tensor | None, ...]:
    """The stored numbers, scales, codes, centroids and the numbers of each byte."""
    if isinstance(tokens, Int8):
        return tokens.values, tokens.scales, None, None, None
    if isinstance(tokens, Fp8):
        return tokens.values, None, None, None, None
    return tokens.packed, tokens.scales, tokens.codes, tokens.codec.centroids, tokens.codec.byte_values


def _backward_fake(grad_scores, winners, operands):
    return torch.empty_like(operands.q_values, memory_format=torch.contiguous_format)


_scores_and_winners = differentiable(
    Operator(
        "compressed_forward",
        computed("compressed", blocked, "forward"),
        fake_scores,
        check=partial(check_numbers, "maxsim"),
    ),
    ("scores", "winners"),
    ("q_values",),
    Operator("compressed_backward", computed("compressed", blocked, "backward"), _backward_fake),
    where="maxsim",
)


class SavedAsInt8(torch.autograd.Function):
    """The registered operator of MaxSim with another gradient of the queries: of documents rounded to int8.

    ``q_values`` and ``d_values`` are those of ``operands``, named once more for autograd to see them.
    """

    @staticmethod
    def forward(ctx, q_values: Tensor, d_values: Tensor, operands: ScoringOperands) -> Tensor:
        scores, winners = torch.ops.pylate_fastmaxsim.maxsim_forward(*operands, True)
        rounded, scales = _rounded(d_values)
        # The gradient of the documents needs the shape of theirs only.
        ctx.dtype = d_values.dtype
        *tensors, max_q_length, max_d_length, q_gapless, d_gapless = operands._replace(d_values=rounded)
        ctx.save_for_backward(winners, scales, *tensors)
        ctx.sizes = max_q_length, max_d_length, q_gapless, d_gapless
        return scores

    @staticmethod
    def backward(ctx, grad_scores: Tensor):
        winners, scales, *tensors = ctx.saved_tensors
        operands = ScoringOperands(*tensors, *ctx.sizes)
        rounded = operands.d_values
        need_q, need_d, _ = ctx.needs_input_grad
        grad_q = grad_d = None
        if need_q:
            compressed = CompressedOperands(
                operands.q_values, operands.q_starts, operands.q_lengths, operands.q_keep,
                rounded, scales, None, None, None, operands.d_starts, operands.d_lengths, operands.d_keep,
                operands.candidates, operands.max_q_length, operands.max_d_length, operands.q_gapless, True, 1.0,
            )  # fmt: skip
            grad_q = torch.ops.pylate_fastmaxsim.compressed_backward(grad_scores, winners, *compressed)
        if need_d:
            shape_only = torch.empty(1, 1, dtype=ctx.dtype, device=rounded.device).expand(rounded.shape)
            operands = operands._replace(d_values=shape_only)
            _, grad_d = torch.ops.pylate_fastmaxsim.maxsim_backward(grad_scores, winners, *operands, False, True)
        return grad_q, grad_d, None


def _rounded(values: Tensor) -> tuple[Tensor, Tensor]:
    """Vectors as int8, and the scale of each."""
    if not torch.compiler.is_compiling() and runs_kernels(values):
        return kernels("compressed").round_rows(values.contiguous(), torch.int8)
    return rounded_queries(values, "int8")
