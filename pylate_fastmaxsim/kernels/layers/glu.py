"""Gated linear units, ``gelu(x[:, :F]) * x[:, F:]``, and their gradient."""

import triton
import triton.language as tl

from pylate_fastmaxsim.kernels.runtime.cached_launch import kernel


@triton.jit
def _gelu(x):
    """The exact GELU, x times the distribution function of the normal distribution, and its derivative."""
    below = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
    return x * below, below + x * (0.3989422804014327 * tl.exp(-0.5 * x * x))


@triton.jit
def _load_both(x, block, num_rows, F: tl.constexpr, BLOCK: tl.constexpr):
    """Places in ``[num_rows, F]`` and ``[num_rows, 2 * F]``, what is inside, and both halves."""
    place = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row = place // F
    inside = row < num_rows
    of_x = row * (2 * F) + place % F
    input = tl.load(x + of_x, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(x + of_x + F, mask=inside, other=0.0).to(tl.float32)
    return place, of_x, inside, input, gate


@kernel("num_rows")
def glu_kernel(x, hidden, num_rows, F: tl.constexpr, BLOCK: tl.constexpr):
    """``hidden [num_rows, F]`` of ``x [num_rows, 2 * F]``, BLOCK numbers in a program."""
    place, _, inside, input, gate = _load_both(x, tl.program_id(0), num_rows, F, BLOCK)
    value, _ = _gelu(input)
    # Rounded as PyTorch rounds the activation.
    value = value.to(hidden.dtype.element_ty).to(tl.float32)
    tl.store(hidden + place, (value * gate).to(hidden.dtype.element_ty), mask=inside)


@kernel("num_rows")
def glu_gradient_kernel(x, grad_hidden, grad_x, hidden, num_rows, F: tl.constexpr, BLOCK: tl.constexpr):
    """``grad_x`` of ``grad_hidden``, and ``hidden`` again unless it is None."""
    place, of_x, inside, input, gate = _load_both(x, tl.program_id(0), num_rows, F, BLOCK)
    grad = tl.load(grad_hidden + place, mask=inside, other=0.0).to(tl.float32)
    value, slope = _gelu(input)
    value = value.to(grad_x.dtype.element_ty).to(tl.float32)
    tl.store(grad_x + of_x, (grad * gate * slope).to(grad_x.dtype.element_ty), mask=inside)
    tl.store(grad_x + of_x + F, (grad * value).to(grad_x.dtype.element_ty), mask=inside)
    if hidden is not None:
        tl.store(hidden + place, (value * gate).to(hidden.dtype.element_ty), mask=inside)
