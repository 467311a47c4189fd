"""Attention within each of many packed texts as differentiable operators: of vectors, and with the projection to them.

Triton kernels compute them on CUDA. On a CPU plain PyTorch does, text by text, for tests and traces.
"""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from pylate_fastmaxsim import reference
from pylate_fastmaxsim._checks import require_tensor
from pylate_fastmaxsim._operands import Texts
from pylate_fastmaxsim.kernels.runtime.arch import architecture
from pylate_fastmaxsim.ops.operands import has_kernels, kernels
from pylate_fastmaxsim.ops.registered import Operator, differentiable, fake_linear_gradients

# With fewer tokens a step is bound by the host, and FlashAttention launches in less host time.
FEWEST_TOKENS = 2**14
# Without a window FlashAttention is faster for longer texts. For (numbers of a head, dropout): up to how many tokens a
# text on average these kernels take it. On an H100 they were faster at 180, 80 and 48 (benchmarks/operators/attention.py).
LONGEST_MEAN = {(64, False): 192, (64, True): 82, (32, False): 82, (32, True): 50, (96, False): 50, (128, False): 50}
LONGEST = 1024
# With a window only heads of this many numbers, without dropout, were measured.
HEAD_DIM = 64


def text_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    key_cu_seqlens: Tensor,
    max_length: int,
    scale: float,
    reach: int = -1,
    dropout: float = 0.0,
) -> Tensor:
    """Softmax attention of the rows of each text to its keys: ``softmax(scale * q @ k.T) @ v`` for each head.

    For batches of many short texts, for which most tiles of FlashAttention are mostly empty. ``query`` is
    ``[T, heads, d]``, ``key`` and ``value`` are ``[S, heads, d]``; on CUDA bfloat16 or float16 with d a multiple of 8 from 16
    to 128, else ValueError. Text n is the rows from ``cu_seqlens[n]`` to ``cu_seqlens[n + 1]``, ``[N + 1]`` int32, and its keys
    likewise; none has more than ``max_length`` of either. A row sees keys at most ``reach`` away from it by position in the
    text, -1: all. Rows without a key and rows behind the last text give 0.

    With ``dropout``, from 0 to less than 1, a weight is dropped with this probability and others are divided by
    ``1 - dropout``. The seed is drawn from PyTorch's generator of the device, and the backward drops the same.

    Sums are float32; weights and the gradients of logits are rounded to the dtype of the vectors, as in FlashAttention.
    Results and gradients repeat bit by bit. Differentiable once in query, key and value.

    Examples
    --------
    >>> import torch
    >>> from pylate_fastmaxsim.ops.encoder.attention import text_attention
    >>> q, k, v = torch.randn(3, 5, 2, 16)
    >>> cu_seqlens = torch.tensor([0, 2, 5], dtype=torch.int32)
    >>> text_attention(q, k, v, cu_seqlens, cu_seqlens, max_length=3, scale=0.25).shape
    torch.Size([5, 2, 16])
    """
    seed = _seed("text_attention", query, dropout)
    if query.is_cuda:
        _check_vectors("text_attention", query.dtype, query.shape[2])
    return torch.ops.pylate_fastmaxsim.text_attention(
        query, key, value, cu_seqlens, key_cu_seqlens, max_length, scale, reach, seed, dropout
    )[0]


def rotary_self_attention(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    cu_seqlens: Tensor,
    key_cu_seqlens: Tensor,
    max_length: int,
    heads: int,
    scale: float,
    reach: int = -1,
    dropout: float = 0.0,
) -> Tensor:
    """:func:`text_attention` of the projections of hidden states, with rotary positions of queries and keys.

    Projection and attention are one operator, so that queries and keys are turned where the projection left them, and no
    other copy of them is made or kept. ``x`` is ``[T, C]``, ``weight`` ``[3 * heads * d, C]`` and ``bias`` ``[3 * heads * d]``
    or None, for queries, keys and values of all heads, one after the other; d is 16, 32, 64 or 128. Without autocast of
    its own: the caller casts the three. Differentiable once in them.

    ``cos`` and ``sin`` are those of the angles of each row, ``[T, d]``, of any floating dtype: column i is turned with column
    i + d / 2, in float32. The second half of the columns repeats the first, and the kernels do not read it.

    Examples
    --------
    >>> import torch
    >>> from pylate_fastmaxsim.ops.encoder.attention import rotary_self_attention
    >>> x, weight = torch.randn(5, 32), torch.randn(3 * 2 * 16, 32)
    >>> angles = torch.tensor([0.0, 1.0, 0.0, 1.0, 2.0])[:, None].expand(5, 16)
    >>> texts = torch.tensor([0, 2, 5], dtype=torch.int32)
    >>> rotary_self_attention(x, weight, None, angles.cos(), angles.sin(), texts, texts, 3, heads=2, scale=0.25).shape
    torch.Size([5, 2, 16])
    """
    dim = weight.shape[0] // (3 * heads)
    if weight.shape[0] != 3 * heads * dim or dim not in (16, 32, 64, 128):
        raise ValueError(
            f"rotary_self_attention: weight must be [3 * heads * d, C] with heads = {heads} and d = 16, 32, 64 or 128, "
            f"got shape {tuple(weight.shape)}."
        )
    for name, values in (("cos", cos), ("sin", sin)):
        require_tensor("rotary_self_attention", name, values, "[T, d] = [{}, {}]", (x.shape[0], dim))
    seed = _seed("rotary_self_attention", x, dropout)
    if x.is_cuda:
        _check_vectors("rotary_self_attention", x.dtype, dim)
    return torch.ops.pylate_fastmaxsim.rotary_self_attention(
        x, weight, bias, cos, sin, cu_seqlens, key_cu_seqlens, max_length, scale, reach, seed, dropout
    )[0]


def _seed(where: str, values: Tensor, dropout: float) -> Tensor | None:
    """A seed on the device: PyTorch repeats it under checkpointing and knows in a graph that it is random."""
    if not 0 <= dropout < 1:
        raise ValueError(f"{where}: dropout must be from 0 to less than 1, got {dropout}.")
    return torch.randint(2**62, (1,), device=values.device) if dropout else None


def _check_vectors(where: str, dtype: torch.dtype, dim: int) -> None:
    if dtype not in (torch.bfloat16, torch.float16) or dim % 8 or not 16 <= dim <= 128:
        raise ValueError(
            f"{where}: on CUDA vectors must be bfloat16 or float16, of a multiple of 8 from 16 to 128 numbers, got {dtype} "
            f"and {dim}."
        )


def is_faster(
    query: Tensor, key: Tensor, cu_seqlens: Tensor, max_length: int, window: tuple[int, int], dropout: float
) -> bool:
    """Say whether :func:`text_attention` can replace FlashAttention and was measured to be faster."""
    if window[0] != window[1] or key.shape[1] != query.shape[1]:
        return False
    if query.shape[0] < FEWEST_TOKENS or not _measured_on(query.device):
        return False
    return _is_measured(query.shape[0], query.shape[2], cu_seqlens, max_length, window[0], dropout > 0)


def rotary_is_faster(x: Tensor, dim: int, cu_seqlens: Tensor, max_length: int, reach: int) -> bool:
    """Say so of :func:`rotary_self_attention` in a compiled graph, which calls neither by Python."""
    takes = x.dtype in (torch.bfloat16, torch.float16) and dim == HEAD_DIM
    return takes and _measured_on(x.device) and _is_measured(x.shape[0], dim, cu_seqlens, max_length, reach, False)


def _is_measured(tokens: int, dim: int, cu_seqlens: Tensor, max_length: int, reach: int, dropout: bool) -> bool:
    if reach >= 0:
        return dim == HEAD_DIM and not dropout
    longest_mean = LONGEST_MEAN.get((dim, dropout), 0)
    return tokens <= longest_mean * (cu_seqlens.shape[0] - 1) and max_length <= LONGEST


# A constant of a graph. Two functions: a compiler sees no mark of a function behind `functools.cache`.
@torch.compiler.assume_constant_result
def _measured_on(device: torch.device) -> bool:
    return _is_hopper(device)


@functools.cache
def _is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and has_kernels(device) and architecture(device) == 90


def _plain_forward(query: Tensor, key: Tensor, value: Tensor, texts: Texts) -> tuple[Tensor, Tensor]:
    rows, heads, _ = query.shape
    keep = None
    if texts.dropout:
        generator = torch.Generator().manual_seed(int(texts.seed))
        keep = torch.rand(heads, rows, texts.max_length, generator=generator) >= texts.dropout
    seen = texts.cu_seqlens, texts.key_cu_seqlens, texts.scale, texts.reach
    states = reference.attention(query, key, value, *seen, keep, texts.dropout)
    states = pad(states, (0, 0, 0, 0, 0, rows - states.shape[0])).contiguous()
    return states, query.new_zeros((heads, rows), dtype=torch.float32)


def _plain_backward(grad: Tensor, vectors: Sequence[Tensor], texts: Texts) -> tuple[Tensor, ...]:
    leaves = [values.detach().contiguous().requires_grad_() for values in vectors]
    with torch.enable_grad():
        states, _ = _plain_forward(*leaves, texts)
    return torch.autograd.grad(states, leaves, grad)


def _forward(query: Tensor, key: Tensor, value: Tensor, texts: Texts) -> tuple[Tensor, Tensor]:
    if query.is_cuda:
        return kernels("attention").forward(query, key, value, *texts)
    return _plain_forward(query, key, value, texts)


def _backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, log_sums: Tensor, texts: Texts
) -> tuple[Tensor, Tensor, Tensor]:
    if query.is_cuda:
        return kernels("attention").backward(grad, query, key, value, out, log_sums, *texts)
    return _plain_backward(grad, (query, key, value), texts)


def _forward_fake(query, *_):
    rows, heads, dim = query.shape
    return query.new_empty(rows, heads, dim), query.new_empty((heads, rows), dtype=torch.float32)


def _backward_fake(grad, query, key, value, *_):
    laid_out = kernels("attention").laid_out if query.is_cuda else Tensor.contiguous
    return tuple(torch.empty_like(laid_out(values)) for values in (query, key, value))


differentiable(
    Operator("text_attention", _forward, _forward_fake),
    ("out", "log_sums"),
    ("query", "key", "value"),
    Operator("text_attention_backward", _backward, _backward_fake),
)


def _turned(qkv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``qkv [T, 3, heads, d]`` with queries and keys turned."""
    exact = torch.promote_types(qkv.dtype, torch.float32)
    cos, sin = (values[:, None, None].to(exact) for values in (cos, sin))
    vectors = qkv[:, :2].to(exact)
    first, second = vectors.chunk(2, dim=-1)
    turned = vectors * cos + torch.cat([-second, first], dim=-1) * sin
    return torch.cat([turned.to(qkv.dtype), qkv[:, 2:]], dim=1)


def _rotary_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, cos: Tensor, sin: Tensor, texts: Texts
) -> tuple[Tensor, Tensor, Tensor]:
    qkv = linear(x, weight, bias).view(x.shape[0], 3, -1, cos.shape[1])
    if x.is_cuda:
        out, log_sums = kernels("attention").rotary_forward(qkv, cos, sin, *texts)
    else:
        qkv = _turned(qkv, cos, sin)
        out, log_sums = _plain_forward(*qkv.unbind(1), texts)
    return out, log_sums, qkv


def _rotary_backward(
    grad: Tensor, x: Tensor, weight: Tensor, qkv: Tensor, out: Tensor, log_sums: Tensor, cos: Tensor, sin: Tensor,
    texts: Texts, need_x: bool, need_weight: bool, need_bias: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    if x.is_cuda:
        gradient = kernels("attention").rotary_backward(grad, qkv, cos, sin, out, log_sums, *texts)
    else:
        gradients = _plain_backward(grad, qkv.unbind(1), texts)
        gradient = _turned(torch.stack(gradients, dim=1), cos, -sin)
    gradient = gradient.flatten(1)
    return (
        gradient @ weight if need_x else None,
        gradient.t() @ x if need_weight else None,
        gradient.sum(dim=0) if need_bias else None,
    )


def _rotary_forward_fake(x, weight, bias, cos, *_):
    rows, dim = x.shape[0], cos.shape[1]
    heads = weight.shape[0] // (3 * dim)
    log_sums = x.new_empty((heads, rows), dtype=torch.float32)
    return x.new_empty(rows, heads, dim), log_sums, x.new_empty(rows, 3, heads, dim)


differentiable(
    Operator("rotary_self_attention", _rotary_forward, _rotary_forward_fake),
    ("out", "log_sums", "qkv"),
    ("x", "weight", "bias"),
    Operator("rotary_self_attention_backward", _rotary_backward, fake_linear_gradients),
)
