"""The gradient of a LayerNorm together with that of the residual stream that it reads."""

import triton
import triton.language as tl

from pylate_fastmaxsim.kernels.runtime.cached_launch import Launcher


@Launcher
@triton.jit(do_not_specialize=["num_rows"])
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
    for row in range(tl.program_id(0).to(tl.int64), num_rows, tl.num_programs(0)):
        place = row * DIM + columns
        g = tl.load(grad + place, mask=within, other=0.0).to(tl.float32)
        x = tl.load(total + place, mask=within, other=0.0).to(tl.float32)
        passed = tl.load(grad_total + place, mask=within, other=0.0).to(tl.float32)
        inverse = tl.load(rstd + row)
        # Where there is no column, g and scale are 0.
        unit = (x - tl.load(mean + row)) * inverse
        weight_sum += g * unit
        bias_sum += g
        g *= scale
        g_mean = tl.sum(g) / DIM
        g_unit = tl.sum(g * unit) / DIM
        result = passed + (g - g_mean - unit * g_unit) * inverse
        tl.store(grad_x + place, result.to(grad_x.dtype.element_ty), mask=within)
        if grad_branch is not None:
            tl.store(grad_branch + place, result.to(grad_branch.dtype.element_ty), mask=within)
    part = tl.program_id(0) * DIM + columns
    if weight_parts is not None:
        tl.store(weight_parts + part, weight_sum, mask=within)
    if bias_parts is not None:
        tl.store(bias_parts + part, bias_sum, mask=within)
