"""Gradients of the projection to unit token vectors, through the Jacobian of the normalisation in closed form.

With y = W x + b, n = max(|y|, epsilon) and e = y / n, a gradient g of e gives y the gradient (g - (e . g) e) / n. That
is `scale * g - shift * e` with two numbers a row, so that it is computed where it is multiplied and never written. A row
whose g is 0, because no query token chose it, has scale 0 and shift 0, and is not read again.
"""

import triton
import triton.language as tl

from pylate_fastmaxsim.kernels.primitives.matmul import product
from pylate_fastmaxsim.kernels.projection.forward import EPSILON
from pylate_fastmaxsim.kernels.runtime.cached_launch import kernel


@triton.jit
def _tile(values, row, column, mask, OUT: tl.constexpr):
    return tl.load(
        values + row[:, None] * OUT + column[None, :], mask=mask[:, None] & (column[None, :] < OUT), other=0.0
    )


@triton.jit
def _output_gradient(grad, embeddings, scale, shift, row, column, live, NORMALIZE: tl.constexpr, OUT: tl.constexpr):
    """A tile of the gradient of y, in float32."""
    tile = scale[:, None] * _tile(grad, row, column, live, OUT).to(tl.float32)
    if NORMALIZE:
        tile -= shift[:, None] * _tile(embeddings, row, column, live, OUT).to(tl.float32)
    return tile


@kernel("num_rows")
def hidden_gradient_kernel(
    grad,
    embeddings,
    inverse_norms,
    weight,
    grad_hidden,
    scales,
    shifts,
    num_rows,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    NORMALIZE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Scale and shift of BLOCK_T rows, and their `grad_hidden`, unless that is None: the gradient of y @ weight.

    Tiles without a gradient are filled with zeros and take no product.
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    in_rows = row < num_rows
    d = tl.arange(0, BLOCK_D)
    k = tl.arange(0, BLOCK_K)
    found = tl.zeros([BLOCK_T], tl.int32)
    dot = tl.zeros([BLOCK_T], tl.float32)
    if OUT <= BLOCK_D:
        # NaN counts as a gradient.
        g = _tile(grad, row, d, in_rows, OUT)
        found = tl.max((g != 0.0).to(tl.int32), axis=1)
        g = g.to(tl.float32)
        if NORMALIZE:
            e = _tile(embeddings, row, d, found > 0, OUT).to(tl.float32)
            dot = tl.sum(g * e, axis=1)
    else:
        for first_d in range(0, OUT, BLOCK_D):
            g = _tile(grad, row, first_d + d, in_rows, OUT)
            found = tl.maximum(found, tl.max((g != 0.0).to(tl.int32), axis=1))
        if NORMALIZE:
            for first_d in range(0, OUT, BLOCK_D):
                g = _tile(grad, row, first_d + d, found > 0, OUT).to(tl.float32)
                e = _tile(embeddings, row, first_d + d, found > 0, OUT).to(tl.float32)
                dot += tl.sum(g * e, axis=1)
    live = found > 0
    scale = tl.where(live, 1.0, 0.0)
    shift = tl.zeros([BLOCK_T], tl.float32)
    if NORMALIZE:
        scale = tl.load(inverse_norms + row, mask=live, other=0.0)
        # Below epsilon the divisor is a constant; 1 / epsilon may round to a little less.
        shift = tl.where(live & (scale < 0.99999 / EPSILON), scale * dot, 0.0)
    tl.store(scales + row, scale, mask=in_rows)
    tl.store(shifts + row, shift, mask=in_rows)
    if grad_hidden is not None:
        out = grad_hidden + row[:, None] * IN + k[None, :]
        if tl.max(found, axis=0) == 0:
            zeros = tl.zeros([BLOCK_T, BLOCK_K], grad_hidden.dtype.element_ty)
            for first in range(0, IN, BLOCK_K):
                tl.store(out + first, zeros, mask=in_rows[:, None] & (first + k[None, :] < IN))
        else:
            if OUT <= BLOCK_D:
                y = scale[:, None] * g
                if NORMALIZE:
                    y -= shift[:, None] * e
                y = y.to(weight.dtype.element_ty)
                w_pointers = weight + tl.minimum(d, OUT - 1)[:, None] * IN + k[None, :]
                for first in range(0, IN, BLOCK_K):
                    w = tl.load(w_pointers + first, mask=first + k[None, :] < IN, other=0.0)
                    total = product(y, w, tl.zeros([BLOCK_T, BLOCK_K], tl.float32), PRECISION)
                    tl.store(out + first, total, mask=in_rows[:, None] & (first + k[None, :] < IN))
            else:
                for first in range(0, IN, BLOCK_K):
                    total = tl.zeros([BLOCK_T, BLOCK_K], tl.float32)
                    for first_d in range(0, OUT, BLOCK_D):
                        y = _output_gradient(grad, embeddings, scale, shift, row, first_d + d, live, NORMALIZE, OUT)
                        w_row = tl.minimum(first_d + d, OUT - 1)
                        w = tl.load(
                            weight + w_row[:, None] * IN + first + k[None, :],
                            mask=first + k[None, :] < IN,
                            other=0.0,
                        )
                        total = product(y.to(weight.dtype.element_ty), w, total, PRECISION)
                    tl.store(out + first, total, mask=in_rows[:, None] & (first + k[None, :] < IN))


@kernel("num_rows", "rows_per_part")
def weight_gradient_kernel(
    grad,
    embeddings,
    hidden,
    scales,
    shifts,
    grad_weights,
    grad_biases,
    num_rows,
    rows_per_part,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    NORMALIZE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The sum over one part of the rows of a tile of the weight's gradient, and of the bias's unless that is None.

    Rows without a gradient are not read, so that NaN in their hidden states has no effect.
    """
    COLUMN_BLOCKS: tl.constexpr = (OUT + BLOCK_D - 1) // BLOCK_D
    TILES: tl.constexpr = COLUMN_BLOCKS * ((IN + BLOCK_K - 1) // BLOCK_K)
    # Tiles vary fastest, so that programs running together share rows in L2.
    program = tl.program_id(0)
    part = (program // TILES).to(tl.int64)
    d = (program % COLUMN_BLOCKS) * BLOCK_D + tl.arange(0, BLOCK_D)
    k_block = program % TILES // COLUMN_BLOCKS
    k = k_block * BLOCK_K + tl.arange(0, BLOCK_K)
    begin = part * rows_per_part
    end = tl.minimum(begin + rows_per_part, num_rows)
    # Transposed, because matrix units take an operand from shared memory, where the computed one is, only as the right one.
    total = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
    bias_total = tl.zeros([BLOCK_D], tl.float32)
    for first in range(begin, end, BLOCK_R):
        row = first + tl.arange(0, BLOCK_R)
        scale = tl.load(scales + row, mask=row < end, other=0.0)
        shift = tl.load(shifts + row, mask=row < end, other=0.0)
        live = (scale != 0.0) | (shift != 0.0)
        y = _output_gradient(grad, embeddings, scale, shift, row, d, live, NORMALIZE, OUT)
        x = _tile(hidden, row, k, live, IN)
        total = product(tl.trans(x), y.to(x.dtype), total, PRECISION)
        if grad_biases is not None:
            bias_total += tl.sum(y, axis=0)
    out = grad_weights + (part * OUT + d[None, :]) * IN + k[:, None]
    tl.store(out, total, mask=(d[None, :] < OUT) & (k[:, None] < IN))
    if grad_biases is not None:
        tl.store(grad_biases + part * OUT + d, bias_total, mask=(d < OUT) & (k_block == 0))
