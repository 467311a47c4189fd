"""Compile an encoder layer by layer, for any number of tokens."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from pylate_fastmaxsim.integrations import compiled_checkpointing, log_once
from pylate_fastmaxsim.integrations.wrappers import is_compiled, unwrap

# All layers share one code object, and with it one budget of compiled variants: first, local and global layers,
# times queries and documents, times training and evaluation, times autocast on and off.
_RECOMPILE_LIMIT = 64

_compiled: WeakKeyDictionary[nn.Module, list[nn.Module]] = WeakKeyDictionary()
_recompile_limit_before: int | None = None


def compile_layers(model: nn.Module) -> None:
    """Compile the layers of a model's encoder, if that has not been done.

    Layers are alike, so that the compiler's work for the first serves the others: seconds, not the
    minutes of a whole model. A model that the user compiled is left as it is.

    Parameters
    ----------
    model
        A ``pylate.models.ColBERT``, possibly wrapped.
    """
    global _recompile_limit_before
    core = unwrap(model)
    if core in _compiled:
        # An adapter may have come since.
        compiled_checkpointing.include(_compiled[core])
        return
    if is_compiled(model):
        log_once("The model is compiled already; compile=True does nothing to it.", about=core)
        return
    layers = [layer for layer in encoder_layers(core) if layer._compiled_call_impl is None]
    if not layers:
        log_once("compile=True does nothing: %s has no layers that are not compiled.", type(core).__name__, about=core)
    for layer in layers:
        layer.compile(dynamic=True)
    compiled_checkpointing.include(layers)
    _compiled[core] = layers
    if _recompile_limit_before is None:
        _recompile_limit_before = torch._dynamo.config.recompile_limit
        torch._dynamo.config.recompile_limit = max(_recompile_limit_before, _RECOMPILE_LIMIT)


def mark_varying(features: dict[str, Tensor]) -> None:
    """Tell ``torch.compile`` that the sizes of these inputs vary, before it learns so by compiling twice."""
    for tensor in features.values():
        # Of texts that are dictionaries PyLate's tokenizer leaves the keys as well.
        for dim, size in enumerate(getattr(tensor, "shape", ())):
            if size > 1:
                torch._dynamo.maybe_mark_dynamic(tensor, dim)


def encoder_layers(model: nn.Module) -> list[nn.Module]:
    """The layers of an encoder: its list of modules with the most parameters.

    Examples
    --------
    >>> encoder_layers(nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])}))
    [Linear(in_features=1, out_features=1, bias=True), Linear(in_features=1, out_features=1, bias=True)]
    """
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return list(max(lists, key=lambda layers: sum(weight.numel() for weight in layers.parameters()), default=[]))


def release() -> None:
    """Run the layers uncompiled again that :func:`compile_layers` compiled."""
    global _recompile_limit_before
    for layers in _compiled.values():
        for layer in layers:
            layer._compiled_call_impl = None
    _compiled.clear()
    compiled_checkpointing.release()
    if _recompile_limit_before is not None:
        torch._dynamo.config.recompile_limit = _recompile_limit_before
        _recompile_limit_before = None
