"""MaxSim over compressed documents in blocked PyTorch: each block of documents is decompressed as it is scored."""

from __future__ import annotations

import torch
from torch import Tensor

from pylate_fastmaxsim._dtypes import sum_dtype
from pylate_fastmaxsim._operands import CompressedOperands
from pylate_fastmaxsim.codec import decoded
from pylate_fastmaxsim.compressed import rounded_queries
from pylate_fastmaxsim.cpu.maxsim import WINNER_ELEMENTS, Vectors, scored, weighted_sums, winning_tokens

# Numbers of documents that the backward decompresses at once: 64 MiB of float32.
DECOMPRESSED_ELEMENTS = 1 << 24


def _vectors(operands: CompressedOperands) -> tuple[Vectors, Tensor | None]:
    """Reader of the documents, and their scales ``[Nd]``. int8 as whole numbers, whose products are exact."""
    stored, scales = operands.stored, operands.scales
    dtype = sum_dtype(operands.q_values.dtype)
    if operands.format == "int8":
        scales = scales.to(dtype)
        token_scales, d_scales = (scales, None) if operands.per_token else (None, scales)
        return Vectors(lambda rows: stored.index_select(0, rows).to(dtype), token_scales), d_scales
    if operands.format == "fp8":
        # Float8 tensors cannot be indexed on every device.
        as_bytes = stored.view(torch.uint8)
        return Vectors(
            lambda rows: as_bytes.index_select(0, rows).view(torch.float8_e4m3fn).to(dtype) * operands.scale
        ), None
    codes, centroids, byte_values = operands.codes, operands.centroids, operands.byte_values

    def read(rows: Tensor) -> Tensor:
        scale = None if scales is None else scales[rows]
        vectors = decoded(codes[rows], stored.index_select(0, rows), scale, centroids, byte_values)
        return vectors.to(operands.q_values.dtype).to(dtype)

    return Vectors(read), None


def forward(operands: CompressedOperands, want_winners: bool) -> tuple[Tensor, Tensor | None]:
    """Scores ``[Nq, P]`` and winners ``[P, Tq]`` (``None`` if not wanted); see :mod:`pylate_fastmaxsim.ops.compressed`."""
    q_values, q_scales = operands.q_values, None
    dtype = sum_dtype(q_values.dtype)
    if operands.format != "residual":
        q_values, q_scales = rounded_queries(q_values, operands.format)
        q_values, q_scales = q_values.to(dtype), q_scales.to(dtype)
    vectors, d_scales = _vectors(operands)
    return scored(operands, q_values, vectors, dtype, want_winners, q_scales=q_scales, d_scales=d_scales)


def backward(grad_scores: Tensor, winners: Tensor, operands: CompressedOperands) -> Tensor:
    """Gradient of ``q_values`` from the winners of :func:`forward`; only winning tokens are decompressed."""
    q_values = operands.q_values
    dtype = sum_dtype(q_values.dtype)
    grad_q = q_values.new_zeros(q_values.shape, dtype=dtype)
    vectors, d_scales = _vectors(operands)
    at_once = min(WINNER_ELEMENTS, max(1, DECOMPRESSED_ELEMENTS // max(1, q_values.shape[1])))
    for block, token, _, weight, bag_sizes in winning_tokens(grad_scores, winners, operands, dtype, at_once, d_scales):
        if vectors.scales is not None:
            weight = weight * vectors.scales[token]
        token, place = token.unique(return_inverse=True)
        grad_q[block] += weighted_sums(vectors.read(token), place, weight, bag_sizes)
    return grad_q.to(q_values.dtype)
