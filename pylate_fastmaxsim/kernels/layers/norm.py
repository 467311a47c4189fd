"""The gradient of a LayerNorm together with that of the residual stream that it reads."""

import triton
import triton.language as tl

from pylate_fastmaxsim.kernels.runtime.cached_launch import kernel


@triton.jit
def _row(grad, total, grad_total, mean, rstd, row, num_rows, columns, DIM: tl.constexpr):
    """Load the numbers of a row as they are stored; 0 behind the last row."""
    inside = (columns < DIM) & (row < num_rows)
    place = row * DIM + columns
    return (
        tl.load(grad + place, mask=inside, other=0.0),
        tl.load(total + place, mask=inside, other=0.0),
        tl.load(grad_total + place, mask=inside, other=0.0),
        tl.load(mean + row, mask=row < num_rows, other=0.0),
        tl.load(rstd + row, mask=row < num_rows, other=0.0),
    )


@kernel("num_rows")
def norm_gradient_kernel(
    total,
    weight,
    mean,
    rstd,
    grad,
    grad_total,
    grad_x,
    grad_branch,
    weight_parts,
    bias_parts,
    num_rows,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``grad_x = grad_total`` + the gradient of ``norm(total)``, all ``[num_rows, DIM]``, read and written once.

    ``grad_branch`` is ``grad_x`` in a dtype of its own. Each program writes its sums for weight and bias to a row of
    ``weight_parts`` and ``bias_parts``. These three may be None.
    """
    columns = tl.arange(0, BLOCK)
    within = columns < DIM
    scale = tl.load(weight + columns, mask=within, other=0.0).to(tl.float32)
    weight_sum = tl.zeros([BLOCK], tl.float32)
    bias_sum = tl.zeros([BLOCK], tl.float32)
    first = tl.program_id(0).to(tl.int64)
    g, x, passed, centre, inverse = _row(grad, total, grad_total, mean, rstd, first, num_rows, columns, DIM)
    for row in range(first, num_rows, tl.num_programs(0)):
        # The next row is on its way while this one is summed.
        following = row + tl.num_programs(0)
        next_g, next_x, next_passed, next_centre, next_inverse = _row(
            grad, total, grad_total, mean, rstd, following, num_rows, columns, DIM
        )
        g = g.to(tl.float32)
        # Where there is no column, g and scale are 0.
        unit = (x.to(tl.float32) - centre) * inverse
        weight_sum += g * unit
        bias_sum += g
        g *= scale
        g_mean = tl.sum(g) / DIM
        g_unit = tl.sum(g * unit) / DIM
        result = passed.to(tl.float32) + (g - g_mean - unit * g_unit) * inverse
        place = row * DIM + columns
        tl.store(grad_x + place, result.to(grad_x.dtype.element_ty), mask=within)
        if grad_branch is not None:
            tl.store(grad_branch + place, result.to(grad_branch.dtype.element_ty), mask=within)
        g, x, passed, centre, inverse = next_g, next_x, next_passed, next_centre, next_inverse
    part = tl.program_id(0) * DIM + columns
    if weight_parts is not None:
        tl.store(weight_parts + part, weight_sum, mask=within)
    if bias_parts is not None:
        tl.store(bias_parts + part, bias_sum, mask=within)


@kernel("num_parts")
def sum_parts_kernel(parts, sums, num_parts, DIM: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK columns of ``sums [DIM]``, those of ``parts [num_parts, DIM]``."""
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for first in range(0, num_parts, ROWS):
        rows = first + tl.arange(0, ROWS)
        inside = (rows < num_parts)[:, None] & (columns < DIM)[None, :]
        total += tl.load(parts + rows[:, None] * DIM + columns[None, :], mask=inside, other=0.0)
    tl.store(sums + columns, tl.sum(total, axis=0).to(sums.dtype.element_ty), mask=columns < DIM)
