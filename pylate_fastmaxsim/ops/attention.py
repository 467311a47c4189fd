"""Attention within each of many packed texts, as a differentiable operator on CUDA."""

from __future__ import annotations

import functools
from types import ModuleType

import torch
from torch import Tensor

from pylate_fastmaxsim.kernels.runtime.arch import architecture
from pylate_fastmaxsim.ops.dispatch import has_kernels

# With fewer tokens a step is bound by the host, and FlashAttention launches in less host time.
FEWEST_TOKENS = 2**14
# Without a window FlashAttention is faster for longer texts. On an H100 these kernels were 1.18 times as fast for texts
# of 180 tokens, and 0.91 times for 300 tokens (benchmarks/operators/attention.py).
LONGEST_MEAN = 192
LONGEST = 1024


def text_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    key_cu_seqlens: Tensor,
    max_length: int,
    scale: float,
    reach: int = -1,
) -> Tensor:
    """Softmax attention of the rows of each text to its keys: ``softmax(scale * q @ k.T) @ v`` for each head.

    For batches of many short texts, for which most tiles of FlashAttention are mostly empty. Sums are float32; weights
    and the gradients of logits are rounded to the dtype of the vectors, as in FlashAttention. Results and gradients
    repeat bit by bit. Differentiable once in query, key and value.

    Parameters
    ----------
    query
        ``[T, heads, d]``, bfloat16 or float16, on a CUDA device; d is a power of 2 from 16 on.
    key, value
        ``[S, heads, d]``.
    cu_seqlens
        First row of each text and the end of the last one, ``[N + 1]``, int32.
    key_cu_seqlens
        The same for ``key`` and ``value``.
    max_length
        An upper bound on the rows and the keys of a text.
    scale
        Factor on the inner products.
    reach
        Largest distance between a row and a key that it sees, by position in the text; -1: any.

    Returns
    -------
    Tensor
        ``[T, heads, d]``; 0 for a text without keys.

    Raises
    ------
    NotImplementedError
        The vectors are not on a CUDA device.

    Examples
    --------
    >>> import torch
    >>> from pylate_fastmaxsim.ops.attention import text_attention
    >>> if torch.cuda.is_available():
    ...     q, k, v = torch.randn(3, 5, 2, 16, dtype=torch.bfloat16, device="cuda")
    ...     cu_seqlens = torch.tensor([0, 2, 5], dtype=torch.int32, device="cuda")
    ...     assert text_attention(q, k, v, cu_seqlens, cu_seqlens, max_length=3, scale=0.25).shape == (5, 2, 16)
    """
    return torch.ops.pylate_fastmaxsim.text_attention(
        query, key, value, cu_seqlens, key_cu_seqlens, max_length, scale, reach
    )[0]


def is_faster(
    query: Tensor, key: Tensor, cu_seqlens: Tensor, max_length: int, window: tuple[int, int], dropout: float
) -> bool:
    """Whether :func:`text_attention` can replace FlashAttention and was measured to be faster."""
    if dropout or window[0] != window[1] or key.shape[1] != query.shape[1] or query.shape[2] != 64:
        return False
    if query.shape[0] < FEWEST_TOKENS or not _measured_on(query.device):
        return False
    texts = cu_seqlens.shape[0] - 1
    return window[0] >= 0 or (query.shape[0] <= LONGEST_MEAN * texts and max_length <= LONGEST)


# A constant of a graph.
@torch.compiler.assume_constant_result
def _measured_on(device: torch.device) -> bool:
    return _is_hopper(device)


@functools.cache
def _is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and has_kernels(device) and architecture(device) == 90


@functools.cache
def _kernels() -> ModuleType:
    from pylate_fastmaxsim.kernels.attention import launch

    return launch


torch.library.define(
    "pylate_fastmaxsim::text_attention",
    "(Tensor query, Tensor key, Tensor value, Tensor cu_seqlens, Tensor key_cu_seqlens, SymInt max_length, "
    "float scale, int reach) -> (Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)
torch.library.define(
    "pylate_fastmaxsim::text_attention_backward",
    "(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor out, Tensor log_sums, Tensor cu_seqlens, "
    "Tensor key_cu_seqlens, SymInt max_length, float scale, int reach) -> (Tensor, Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)


@torch.library.impl("pylate_fastmaxsim::text_attention", "CUDA")
def _forward(*arguments):
    return _kernels().forward(*arguments)


@torch.library.impl("pylate_fastmaxsim::text_attention_backward", "CUDA")
def _backward(*arguments):
    return _kernels().backward(*arguments)


@torch.library.register_fake("pylate_fastmaxsim::text_attention")
def _forward_fake(query, *_):
    rows, heads, dim = query.shape
    return query.new_empty(rows, heads, dim), query.new_empty((heads, rows), dtype=torch.float32)


@torch.library.register_fake("pylate_fastmaxsim::text_attention_backward")
def _backward_fake(grad, query, key, value, *_):
    return tuple(torch.empty_like(_kernels().laid_out(values)) for values in (query, key, value))


def _save_for_backward(ctx, inputs, output):
    *tensors, ctx.max_length, ctx.scale, ctx.reach = inputs
    ctx.save_for_backward(*tensors[:3], *output, *tensors[3:])
    ctx.set_materialize_grads(False)


def _differentiate(ctx, grad, _):
    if grad is None:
        return (None,) * 8
    gradients = torch.ops.pylate_fastmaxsim.text_attention_backward(
        grad, *ctx.saved_tensors, ctx.max_length, ctx.scale, ctx.reach
    )
    needed = zip(gradients, ctx.needs_input_grad, strict=False)
    return (*(gradient if needs else None for gradient, needs in needed), None, None, None, None, None)


torch.library.register_autograd("pylate_fastmaxsim::text_attention", _differentiate, setup_context=_save_for_backward)
