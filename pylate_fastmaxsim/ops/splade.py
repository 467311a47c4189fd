"""SPLADE's head as a differentiable operator: the best logit of a text for each vocabulary row, without all logits."""

from typing import Literal

import torch
from torch import Tensor

from pylate_fastmaxsim._checks import require_tensor
from pylate_fastmaxsim._dtypes import sum_dtype
from pylate_fastmaxsim._operands import SpladeOperands
from pylate_fastmaxsim._winners import winner_dtype
from pylate_fastmaxsim.cpu import splade as blocked
from pylate_fastmaxsim.ops.operands import (
    KERNEL_DTYPES,
    cast_by_autocast,
    computed,
    fake_of,
    refuse_shared_rows,
    refuse_transforms,
    require_one_dtype,
    require_projection,
    require_vector_dtype,
)
from pylate_fastmaxsim.ops.registered import Operator, differentiable
from pylate_fastmaxsim.tokens import TokenBatch, Tokens, as_batch

ActivationFunction = Literal["relu", "log1p_relu"] | None


def splade_pool(
    hidden: Tokens,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    mask: Tensor | None = None,
    activation_function: ActivationFunction = "relu",
    log1p: bool = True,
) -> Tensor:
    """Max pooling of SPLADE: the best logit of each text for each vocabulary row, then ``log(1 + relu(...))``.

    ``m[n, v] = max over live tokens t of (<weight[v], hidden[n, t]> + bias[v])``, without holding the logits: the
    projection to the vocabulary and the pooling are one operator. Relu and logarithm are monotone, so they come after the
    maximum. Differentiable once in ``hidden``, ``weight`` and ``bias``; gradients go to the token that gave the maximum,
    and with relu only where it is positive. The first of equal maxima wins. A text without a live token gives 0 and
    passes no gradient. NaN in a live token, in ``weight`` or in ``bias`` gives NaN in every value that uses it, and in the
    gradients. Repeatable bit by bit.

    Parameters
    ----------
    hidden
        Hidden states of N texts, as the last projection of a masked language model takes them: a ``TokenBatch``, or padded
        ``[N, L, d]``. bfloat16, float16, float32 or float64.
    weight
        Output embedding, ``[V, d]``, of the same dtype and device.
    bias
        ``[V]``, of any floating dtype. ``None``: none.
    mask
        With padded hidden states: tokens that count, ``[N, L]``, bool or 0/1, any pattern. ``None``: all.
    activation_function
        ``"relu"``: ``log1p(relu(m))``. ``"log1p_relu"``: ``log1p(log1p(relu(m)))``. Both as in Sentence Transformers'
        ``SpladePooling``. ``None``: m itself, which needs ``log1p=False``.
    log1p
        ``False`` leaves the last logarithm out.

    Returns
    -------
    Tensor
        ``[N, V]``, float32, or float64 for float64 input.

    Raises
    ------
    ValueError
        Shapes, dtypes or devices do not fit together, or ``activation_function`` is none of the above. On a CPU also: the
        mask holds more than 0 and 1, or texts share rows where gradients are wanted.
    TypeError
        An argument is of the wrong type.
    NotImplementedError
        Second derivatives are asked for, or the call is inside of torch.vmap, torch.func or forward-mode derivatives.

    Notes
    -----
    Autocast, float32 precision and sums are as in :func:`pylate_fastmaxsim.maxsim`: under autocast hidden states and weight
    are cast to its dtype. The bias is added in float32. The kernels round logits down to 21 significant bits, an error
    below 1e-6 of them, before they compare them. The backward keeps ``hidden``, ``weight``, the result and, of each value,
    the position of its token in one or two bytes.

    Examples
    --------
    >>> import torch
    >>> from pylate_fastmaxsim import TokenBatch, splade_pool
    >>> texts = TokenBatch.from_list([torch.tensor([[3.0, -1.0], [1.0, 1.0]]), torch.tensor([[0.0, -2.0]])])
    >>> weight, bias = torch.eye(2), torch.tensor([0.0, 1.0])
    >>> splade_pool(texts, weight, bias)
    tensor([[1.3863, 1.0986],
            [0.0000, 0.0000]])
    >>> splade_pool(texts, weight, bias, activation_function=None, log1p=False)
    tensor([[ 3.,  2.],
            [ 0., -1.]])
    """
    operands = _prepared(hidden, weight, bias, mask, activation_function, log1p)
    values, _ = _values_and_winners(operands, _recording(operands))
    return values


def _prepared(
    hidden: Tokens,
    weight: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    activation_function: ActivationFunction,
    log1p: bool,
) -> SpladeOperands:
    """The arguments of a call after all checks, with hidden states and weight cast as autocast casts them."""
    refuse_transforms("splade_pool")
    rectified, logs = _activation(activation_function, log1p)
    texts = as_batch("splade_pool", "hidden states", hidden, mask, "mask")
    require_projection("splade_pool", texts.values, weight, bias, "[V, d]")
    values, weight = cast_by_autocast(texts.values, weight)
    require_one_dtype("splade_pool", "hidden states", values, "weight", weight)
    require_vector_dtype("splade_pool", "hidden states", values)
    require_tensor("splade_pool", "weight", weight, "[V, d] with d = {}", (None, values.shape[1]))
    if bias is not None:
        rows, floating = weight.shape[0], (*KERNEL_DTYPES, torch.float64)
        require_tensor("splade_pool", "bias", bias, "floating point [V] with V = {}", (rows,), floating)
    return SpladeOperands(
        values, texts.starts, texts.lengths, texts.keep, weight, bias, texts.max_length, texts.gapless, rectified, logs
    )


def _activation(activation_function: ActivationFunction, log1p: bool) -> tuple[bool, int]:
    """Relu after the maximum or not, and the number of logarithms."""
    if not isinstance(log1p, bool):
        raise TypeError(f"splade_pool: log1p must be True or False, got {log1p!r}.")
    if activation_function is None:
        if log1p:
            raise ValueError("splade_pool: activation_function=None needs log1p=False, since maxima may be negative.")
        return False, 0
    if activation_function not in ("relu", "log1p_relu"):
        raise ValueError(
            f'splade_pool: activation_function must be "relu", "log1p_relu" or None, got {activation_function!r}.'
        )
    return True, (activation_function == "log1p_relu") + log1p


def _recording(operands: SpladeOperands) -> bool:
    """Say whether a backward needs winners; ValueError where texts on a CPU share rows that get a gradient."""
    hidden, weight, bias = operands.hidden, operands.weight, operands.bias
    if not torch.is_grad_enabled():
        return False
    if hidden.requires_grad:
        refuse_shared_rows("splade_pool", "texts", operands.starts, operands.lengths, operands.gapless)
    return hidden.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)


def _check_numbers(operands: SpladeOperands, want_winners: bool) -> None:
    hidden, starts, lengths, keep, *_ = operands
    if hidden.is_cpu:
        TokenBatch(hidden, starts, lengths, operands.max_length, keep, operands.gapless)


def _forward_fake(operands, want_winners):
    texts, vocabulary = operands.starts.shape[0], operands.weight.shape[0]
    values = operands.hidden.new_empty((texts, vocabulary), dtype=sum_dtype(operands.hidden.dtype))
    if not want_winners:
        return values, None
    return values, values.new_empty((texts, vocabulary), dtype=winner_dtype(operands.max_length))


def _backward_fake(grad, values, winners, operands, *needs):
    return fake_of((operands.hidden, operands.weight, operands.bias if needs[-1] else values), needs)


_values_and_winners = differentiable(
    Operator("splade_forward", computed("splade", blocked, "forward"), _forward_fake, check=_check_numbers),
    ("values", "winners"),
    ("hidden", "weight", "bias"),
    Operator("splade_backward", computed("splade", blocked, "backward"), _backward_fake),
    where="splade_pool",
)
