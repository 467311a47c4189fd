"""Projection to unit token vectors in blocked PyTorch: the CPU path, and the path of devices and dtypes without a kernel.

The backward leaves out rows without a gradient; finding them waits for the device where that is not a CPU.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from pylate_fastmaxsim._dtypes import sum_dtype

# F.normalize divides by the norm or by this, whichever is larger.
EPSILON = 1e-12

# Rows of a block: for 16-bit vectors, the only float32 copies.
ROWS = 1 << 10


def forward(hidden: Tensor, weight: Tensor, bias: Tensor | None, normalize: bool) -> tuple[Tensor, Tensor]:
    """Embeddings ``[T, d]`` in the dtype of ``hidden``, and 1 over their norms, ``[T]`` (``[0]`` unless normalised)."""
    dtype = sum_dtype(hidden.dtype)
    embeddings = hidden.new_empty(len(hidden), len(weight))
    inverse_norms = hidden.new_empty(len(hidden) if normalize else 0, dtype=dtype)
    # As autocast does: the weight is rounded to the dtype of the hidden states.
    weight = weight.to(hidden.dtype).to(dtype)
    for first in range(0, len(hidden), ROWS):
        block = slice(first, first + ROWS)
        with torch.autocast(hidden.device.type, enabled=False):
            values = F.linear(hidden[block].to(dtype), weight, None if bias is None else bias.to(dtype))
        if normalize:
            inverse = values.norm(dim=1).clamp(min=EPSILON).reciprocal()
            inverse_norms[block] = inverse
            values = values * inverse[:, None]
        embeddings[block] = values
    return embeddings, inverse_norms


def backward(
    grad: Tensor,
    hidden: Tensor,
    weight: Tensor,
    embeddings: Tensor,
    inverse_norms: Tensor,
    normalize: bool,
    need_hidden: bool,
    need_weight: bool,
    need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of ``hidden``, ``weight`` and bias (in the dtype of ``weight``); an empty tensor for one not needed."""
    dtype = sum_dtype(hidden.dtype)
    grad_hidden = hidden.new_zeros(hidden.shape if need_hidden else 0)
    grad_weight = weight.new_zeros(weight.shape if need_weight else 0, dtype=dtype)
    grad_bias = weight.new_zeros(len(weight) if need_bias else 0, dtype=dtype)
    operand = weight.to(hidden.dtype).to(dtype)
    for first in range(0, len(grad), ROWS):
        live = (grad[first : first + ROWS] != 0).any(dim=1)
        # A slice if all are live, so that nothing is gathered.
        rows = slice(first, first + ROWS) if bool(live.all()) else live.nonzero().squeeze(1) + first
        values = grad[rows].to(dtype)
        if normalize:
            inverse = inverse_norms[rows, None]
            unit = embeddings[rows].to(dtype)
            along = (values * unit).sum(dim=1, keepdim=True) * unit
            # Below epsilon the divisor is a constant; 1 / epsilon may round to a little less.
            values = torch.where(inverse < 0.99999 / EPSILON, values - along, values) * inverse
        with torch.autocast(hidden.device.type, enabled=False):
            if need_hidden:
                if isinstance(rows, slice) and dtype == hidden.dtype:
                    torch.mm(values, operand, out=grad_hidden[rows])
                else:
                    grad_hidden[rows] = (values @ operand).to(hidden.dtype)
            if need_weight:
                grad_weight.addmm_(values.T, hidden[rows].to(dtype))
        if need_bias:
            grad_bias += values.sum(dim=0)
    return grad_hidden, grad_weight.to(weight.dtype), grad_bias.to(weight.dtype)
