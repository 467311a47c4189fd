"""The layers of ModernBERT, written with fewer passes over memory.

They run so where they are compiled, and of packed texts in inference. A layer computes what transformers' own does, in the
same precision. Norms add the gradient of the residual stream as they make theirs, the gated MLP keeps no activation, and
of packed texts queries and keys are turned where the projection leaves them. The sum at the end of a layer is made
together with the norm that the next one begins with. What of a layer differs from transformers' own (a hook, an adapter,
a subclass) keeps the stock forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, layer_norm
from torch.utils.weak import WeakTensorKeyDictionary

from pylate_fastmaxsim.integrations.models.encoders import is_packed_mask
from pylate_fastmaxsim.integrations.models.user_code import has_global_hooks, has_hooks
from pylate_fastmaxsim.integrations.patching.known_sources import unknown_part
from pylate_fastmaxsim.integrations.patching.patches import Patch, PatchSet
from pylate_fastmaxsim.ops.encoder.attention import rotary_is_faster, rotary_self_attention
from pylate_fastmaxsim.ops.encoder.layers import geglu_linear, norm_with_residual

try:
    from transformers import modeling_layers
    from transformers.activations import GELUActivation
    from transformers.models.modernbert import modeling_modernbert as host
except ImportError:  # an older transformers, without ModernBERT
    host = None

_patches = PatchSet()

# Of states between two layers: for which layer the norm was made, of which version of them, and the norm.
_NORMED = "fastmaxsim_normed"


def install() -> bool:
    """Replace the forward of a layer, and say whether it and all that it calls are the code of a known release.

    Rotary angles of the two types of layers are computed once a forward, not for each layer.
    """
    if not _patches.targets:
        _patches.apply(patches())
    return bool(_patches.targets)


def release() -> None:
    """Undo :func:`install`."""
    _patches.undo()


def patches() -> list[Patch]:
    """What :func:`install` replaces: nothing where a part of it is not the code of a known release."""
    if host is None:
        return []
    layer = host.ModernBertEncoderLayer
    stock = layer.forward
    if stock.__globals__ is vars(modeling_layers):
        # Since transformers 5.16 each subclass of a layer has its forward inside of one that checkpoints.
        stock = stock.__wrapped__
    if any(unknown_part(forward) for forward in (stock, host.ModernBertAttention.forward, host.ModernBertMLP.forward)):
        return []
    # A subclass, so that it is inside of such a one again.
    ours = type(layer.__name__, (modeling_layers.GradientCheckpointingLayer,), {"forward": _with_fewer_passes(stock)})
    rotary = host.ModernBertRotaryEmbedding
    return [Patch(layer, "forward", ours.forward), Patch(rotary, "forward", _once_a_forward(rotary.forward))]


def compile_around_layers(model: nn.Module) -> list[nn.Module]:
    """Compile what each ModernBERT in a model has beside its layers, and return it.

    These are the norms behind the embeddings and at the end. Not the embeddings themselves: the compiled gradient of a
    lookup adds in an order that varies.
    """
    compiled = []
    for encoder in _encoders(model):
        for norm in (encoder.embeddings.norm, encoder.final_norm):
            if type(norm) is nn.LayerNorm and norm._compiled_call_impl is None:
                # Not by its own compile(): Dynamo leaves calls that begin in PyTorch's modules as they are.
                norm._compiled_call_impl = torch.compile(_call_of(norm), dynamic=True)
                compiled.append(norm)
    return compiled


def _call_of(norm: nn.LayerNorm) -> Callable[[Tensor], Tensor]:
    def call(hidden_states: Tensor) -> Tensor:
        return norm._call_impl(hidden_states)

    return call


def join_layers(model: nn.Module, compiled: list[nn.Module]) -> None:
    """Have each of these layers, if it is of a known ModernBERT, make the norm that the next one begins with."""
    together = torch.compile(_with_next_norm, dynamic=True)
    for encoder in _encoders(model):
        for number, layer in enumerate(encoder.layers):
            if layer in compiled:
                layer._compiled_call_impl = _joined(together, encoder.layers, number, layer)


def _encoders(model: nn.Module) -> Iterable[nn.Module]:
    return (module for module in model.modules() if host is not None and type(module) is host.ModernBertModel)


def _joined(together: Callable, layers: nn.ModuleList, number: int, layer: nn.Module) -> Callable:
    alone = layer._compiled_call_impl

    def call(hidden_states, attention_mask=None, position_embeddings=None, **kwargs):
        recomputed = layer.training and layer.gradient_checkpointing
        if torch.compiler.is_compiling() or recomputed or not torch.is_grad_enabled():
            return alone(
                hidden_states, attention_mask=attention_mask, position_embeddings=position_embeddings, **kwargs
            )
        # What is made for the next layer goes there with the states: to nobody else, and only if they are unchanged.
        reader, version, normed = getattr(hidden_states, _NORMED, (None, None, None))
        if reader is not layer or version != hidden_states._version:
            normed = None
        # Looked up now: FSDP may have wrapped the next layer, whose weights are elsewhere then.
        following = layers[number + 1] if number + 1 < len(layers) else None
        states, normed = together(layer, following, hidden_states, normed, attention_mask, position_embeddings, kwargs)
        if normed is not None:
            setattr(states, _NORMED, (following, states._version, normed))
        return states

    return call


def _with_next_norm(layer, following, hidden_states, normed, mask, positions, kwargs) -> tuple[Tensor, Tensor | None]:
    """The states after a layer, and those that the norm of ``following`` makes of them, if nothing differs there."""
    if not (_is_exactly(layer, host.ModernBertEncoderLayer) and _is_stock_layer(layer, hidden_states)):
        states = layer._call_impl(hidden_states, attention_mask=mask, position_embeddings=positions, **kwargs)
        return states, None
    norm = following.attn_norm if type(following) is host.ModernBertEncoderLayer else None
    if not (_is_exactly(norm, nn.LayerNorm) and norm.weight.dtype == hidden_states.dtype):
        norm = None
    return _layer(layer, hidden_states, mask, positions, kwargs, normed, norm)


def _with_fewer_passes(stock: Callable) -> Callable:
    @wraps(stock)
    def forward(self, hidden_states, attention_mask=None, position_embeddings=None, **kwargs):
        # Not in training, where both passes of GradCache, and a checkpoint, have to do the same.
        of_inference = not (self.training or torch.is_grad_enabled()) and is_packed_mask(attention_mask)
        if (torch.compiler.is_compiling() or of_inference) and _is_stock_layer(self, hidden_states):
            return _layer(self, hidden_states, attention_mask, position_embeddings, kwargs)[0]
        return stock(
            self, hidden_states, attention_mask=attention_mask, position_embeddings=position_embeddings, **kwargs
        )

    return forward


def _once_a_forward(stock: Callable) -> Callable:
    # By states, which every forward makes anew. Angles are not kept longer than they are.
    angles = WeakTensorKeyDictionary()

    @wraps(stock)
    def forward(self, x, position_ids, layer_type=None):
        given = (x, position_ids) if layer_type is None else (x, position_ids, layer_type)
        if torch.compiler.is_compiling():
            return stock(self, *given)
        found = angles.setdefault(x, {})
        positions, made = found.get((self, layer_type), (None, None))
        if positions is not position_ids:
            made = stock(self, *given)
            found[self, layer_type] = position_ids, made
        return made

    return forward


def _is_stock_layer(layer: nn.Module, hidden_states: Tensor) -> bool:
    """Check that a layer and those of its modules that are not called as they are have nothing added.

    Decided while a layer is traced, and looked at again by guards.
    """
    if type(layer) is not host.ModernBertEncoderLayer:
        return False
    attention, mlp = layer.attn, layer.mlp
    if not (_is_exactly(attention, host.ModernBertAttention) and _is_exactly(mlp, host.ModernBertMLP)):
        return False
    modules = [
        # The first layer has none. Its number would be a constant of the graph, which layers share.
        (layer.attn_norm, nn.Identity if type(layer.attn_norm) is nn.Identity else nn.LayerNorm),
        (layer.mlp_norm, nn.LayerNorm),
        (attention.Wqkv, nn.Linear),
        (mlp.Wi, nn.Linear),
        (mlp.act, GELUActivation),
        (mlp.drop, nn.Dropout),
        (mlp.Wo, nn.Linear),
    ]
    return (
        all(_is_exactly(module, cls) for module, cls in modules)
        and mlp.act.act is gelu
        and not has_global_hooks()
        and layer.mlp_norm.weight.dtype == hidden_states.dtype
    )


def _is_exactly(module: object, cls: type[nn.Module]) -> bool:
    return type(module) is cls and not has_hooks(module) and "forward" not in module.__dict__


def _layer(
    layer: nn.Module,
    hidden_states: Tensor,
    mask: Tensor | None,
    positions: tuple,
    kwargs: dict,
    normed: Tensor | None = None,
    next_norm: nn.LayerNorm | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The states after a layer, and their ``next_norm``. ``normed`` is what the layer's first norm would make."""
    device = hidden_states.device.type
    # A Linear rounds what it is given. Rounded by the norm, the gradient comes back as the product leaves it.
    dtype = hidden_states.dtype
    if torch.is_autocast_enabled(device) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
    total = hidden_states.flatten(0, -2)
    # A checkpoint that is compiled would keep what an autograd function saves (PyTorch 2.11).
    recomputed = layer.training and layer.gradient_checkpointing
    norms = norm_with_residual if torch.is_grad_enabled() and not recomputed else _plain_norm

    def norm_of(norm: nn.LayerNorm, total: Tensor, branch: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return norms(total, norm.weight, norm.bias, norm.eps, branch, dtype)

    if normed is None:
        if type(layer.attn_norm) is nn.LayerNorm:
            normed, total = norm_of(layer.attn_norm, total)
        else:
            normed = total.to(dtype)
    attended = _attention(layer.attn, normed.view_as(hidden_states), mask, positions, kwargs)
    mlp = layer.mlp
    normed, total = norm_of(layer.mlp_norm, total, attended.flatten(0, -2))
    dropped = mlp.training and mlp.drop.p > 0
    added = mlp(normed) if dropped else geglu_linear(mlp.Wi(normed), *_cast(mlp.Wo, dtype))
    if next_norm is None:
        return (total + added).view_as(hidden_states), None
    normed, total = norm_of(next_norm, total, added)
    return total.view_as(hidden_states), normed.view_as(hidden_states)


def _plain_norm(x, weight, bias, eps, branch=None, dtype=None) -> tuple[Tensor, Tensor]:
    total = x if branch is None else x + branch
    return layer_norm(total, weight.shape, weight, bias, eps).to(dtype), total


def _attention(attention: nn.Module, normed: Tensor, mask: Tensor | None, positions: tuple, kwargs: dict) -> Tensor:
    # Only of a packed mask: other graphs are shared by layers with a window and without one.
    if is_packed_mask(mask) and not (attention.training and attention.attention_dropout > 0):
        reach = -1 if attention.sliding_window is None else attention.sliding_window - 1
        cu_seqlens, key_cu_seqlens = mask[0, 0, -1], mask[-1, 0, -1]
        # Not its first element, whose gradient would be copied.
        rows = normed.flatten(0, -2)
        (sides, longest_apart, max_length, _), dim = mask.shape, attention.head_dim
        # What the attention function of packed masks refuses otherwise: query expansion sees the whole query.
        sees_enough = sides == 1 or not -1 < reach < longest_apart - 1
        if sees_enough and rotary_is_faster(rows, dim, cu_seqlens, max_length, reach):
            weights = _cast(attention.Wqkv, normed.dtype)
            cos, sin = (each[0] for each in positions)
            heads = attention.Wqkv.out_features // (3 * dim)
            states = rotary_self_attention(
                rows, *weights, cos, sin, cu_seqlens, key_cu_seqlens, max_length, heads, dim**-0.5, reach
            )
            return attention.out_drop(attention.Wo(states.flatten(1)[None]))
    return attention(normed, position_embeddings=positions, attention_mask=mask, **kwargs)[0]


def _cast(linear: nn.Linear, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    return linear.weight.to(dtype), None if linear.bias is None else linear.bias.to(dtype)
