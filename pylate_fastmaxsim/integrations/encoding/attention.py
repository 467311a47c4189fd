"""Attention inside each text of a row of many texts: packed masks, and attention functions that understand them."""

import gc
import weakref
from collections.abc import Callable
from functools import wraps

import torch
from torch import Tensor, nn

from pylate_fastmaxsim.integrations.compilation import modernbert
from pylate_fastmaxsim.integrations.models.encoders import is_packed_mask
from pylate_fastmaxsim.integrations.patching.known_sources import HOSTS, defined_in
from pylate_fastmaxsim.ops.encoder.attention import is_faster, text_attention

# Attention implementations of transformers that were replaced: name -> the replacement and the original.
_replaced: dict[str, tuple[Callable, Callable]] = {}

# Packed masks in use, perhaps by gradient checkpointing for a backward to come.
_masks: dict[int, weakref.ref[Tensor]] = {}
_released = False


class PackingUnsupported(RuntimeError):
    """This encoder cannot be run on packed documents; the message says why."""


def packed_mask(
    cu_seqlens: Tensor, max_length: int, key_cu_seqlens: Tensor | None = None, longest_apart: int = 1
) -> Tensor:
    """An ``attention_mask`` that keeps attention inside each text of a row of many, int32, a view of ``cu_seqlens``.

    transformers hands a four-dimensional mask to every layer unchanged, also through gradient checkpointing,
    DistributedDataParallel and ``torch.compile``. So ``cu_seqlens`` ``[N + 1]`` travels as its last row, and an upper
    bound on the length of a text, which the host must know, as its third size: ``[1, 1, max_length, N + 1]``.

    In PyLate's query expansion some rows attend without being attended to. Those that are have ``key_cu_seqlens``; rows
    between those of two texts belong to a text without attending rows. ``longest_apart`` bounds the rows of a text that
    has others: ``[2, longest_apart, max_length, N + 1]``.

    Examples
    --------
    A text of two rows, and one of three of which the first is attended to:

    >>> rows, keys = torch.tensor([0, 2, 5, 5], dtype=torch.int32), torch.tensor([0, 2, 3, 5], dtype=torch.int32)
    >>> packed_mask(rows, 3).shape, packed_mask(rows, 3, keys, longest_apart=3).shape
    (torch.Size([1, 1, 3, 4]), torch.Size([2, 3, 3, 4]))
    """
    borders = cu_seqlens.view(1, -1) if key_cu_seqlens is None else torch.stack([cu_seqlens, key_cu_seqlens])
    mask = borders[:, None, None].expand(-1, longest_apart, max_length, -1)
    key = id(mask)
    _masks[key] = weakref.ref(mask, lambda _: _restore(key))
    return mask


def variable_length_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    max_length: int,
    *,
    scale: float | None,
    window: tuple[int, int],
    dropout: float,
    key_cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Softmax attention inside each text, by the kernels of this package where they are faster, else FlashAttention.

    ``query``, ``key`` and ``value`` are ``[T, heads, head_dim]``; keys and values may have fewer heads, by a whole
    factor. ``scale``: None means ``head_dim ** -0.5``. ``window``: how many tokens to the left and to the right a token
    sees; -1 is no limit, ``(-1, 0)`` is causal. Raises PackingUnsupported for a device or a dtype without it.
    """
    if not query.is_cuda:
        raise PackingUnsupported(
            f"variable-length attention needs a CUDA device, the encoder is on {query.device.type}"
        )
    if query.dtype not in (torch.float16, torch.bfloat16):
        raise PackingUnsupported(
            f"variable-length attention needs bfloat16 or float16 (train with bf16=True or fp16=True), got {query.dtype}"
        )
    if key_cu_seqlens is None:
        key_cu_seqlens = cu_seqlens
    if is_faster(query, key, cu_seqlens, max_length, window, dropout):
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        return text_attention(query, key, value, cu_seqlens, key_cu_seqlens, max_length, scale, window[0], dropout)
    # Not torch.nn.attention.varlen.varlen_attn: it has no dropout, and its Python makes a step of 32 queries a sixth
    # slower.
    return torch.ops.aten._flash_attention_forward(
        query,
        key,
        value,
        cu_seqlens,
        key_cu_seqlens,
        max_length,
        max_length,
        dropout,
        window == (-1, 0),
        False,
        scale=scale,
        window_size_left=window[0],
        window_size_right=window[1],
    )[0]


def accept_packed_masks(encoder: nn.Module) -> None:
    """Make the attention function of a model of transformers take packed masks. Other masks go to the original.

    Raises PackingUnsupported if none can be replaced: transformers is too old, or attention is written into the model.
    """
    global _released
    _released = False
    modernbert.install()
    implementation = encoder.config._attn_implementation
    if implementation in _replaced:
        return
    try:
        from transformers import AttentionInterface
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    except ImportError as error:
        raise PackingUnsupported("this version of transformers has no AttentionInterface") from error
    if implementation not in ALL_ATTENTION_FUNCTIONS:
        advice = "; load it with attn_implementation='sdpa'" if getattr(encoder, "_supports_sdpa", False) else ""
        raise PackingUnsupported(
            f"{type(encoder).__name__} computes attn_implementation={implementation!r} in code of its own{advice}"
        )
    original = ALL_ATTENTION_FUNCTIONS[implementation]
    if not defined_in(original, HOSTS):
        # It may add a trained bias that is zero at the time of the check.
        raise PackingUnsupported(f"attn_implementation={implementation!r} is not a function of transformers")

    @wraps(original)
    def attention(module, query, key, value, attention_mask, *args, **kwargs):
        if is_packed_mask(attention_mask):
            return _packed_attention(module, query, key, value, attention_mask, *args, **kwargs), None
        return original(module, query, key, value, attention_mask, *args, **kwargs)

    AttentionInterface.register(implementation, attention)
    _replaced[implementation] = attention, original


def release() -> None:
    """Restore the attention functions that :func:`accept_packed_masks` replaced, once no packed mask is in use.

    The backward of a loss that was computed before needs them.
    """
    global _released
    _released = True
    if _masks:
        # Compiled code leaves masks in reference cycles. Freed later, they could change functions during a trace.
        gc.collect()
    _restore()


def _restore(freed: int | None = None) -> None:
    _masks.pop(freed, None)
    if not _released or _masks or not _replaced:
        return
    from transformers import AttentionInterface
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    for implementation, (attention, original) in _replaced.items():
        # Another one that was registered since stays.
        if ALL_ATTENTION_FUNCTIONS.get(implementation) is attention:
            AttentionInterface.register(implementation, original)
    _replaced.clear()


def _packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    **_: object,
) -> Tensor:
    """The call of transformers, ``[1, heads, T, head_dim]``, as a call of :func:`variable_length_attention`."""
    # With "sdpa" transformers ignores softcap as well.
    if softcap is not None and module.config._attn_implementation != "sdpa":
        raise PackingUnsupported("variable-length attention has no softcap")
    query, key, value = (_cast_as_autocast(states).squeeze(0).transpose(0, 1) for states in (query, key, value))
    # A sliding window of w sees up to w - 1 tokens away, the token itself being the w-th.
    reach = -1 if sliding_window is None else sliding_window - 1
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    kinds, longest_apart, max_length, _ = attention_mask.shape
    if kinds > 1 and (causal or -1 < reach < longest_apart - 1):
        # FlashAttention aligns the ends of a text's rows and of those that they attend to, not their beginnings.
        raise PackingUnsupported(
            "tokens of query expansion have to attend to the whole query, and "
            + ("attention is causal" if causal else f"a window of attention reaches only {reach} tokens")
        )
    # The backward keeps the values. A view would keep the product that holds queries and keys as well.
    value = value.contiguous()
    states = variable_length_attention(
        query,
        key,
        value,
        attention_mask[0, 0, -1],
        max_length,
        scale=scaling,
        window=(reach, 0 if causal else reach),
        dropout=dropout,
        key_cu_seqlens=attention_mask[-1, 0, -1],
    )
    return states.unsqueeze(0)


def _cast_as_autocast(states: Tensor) -> Tensor:
    """Cast as autocast does for torch's own attention: rotary positions may leave queries and keys in float32."""
    device = states.device.type
    if states.dtype == torch.float64 or not torch.is_autocast_enabled(device):
        return states
    return states.to(torch.get_autocast_dtype(device))
