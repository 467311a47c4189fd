"""Check that the modules behind the encoder of a MultiVectorEncoder do not read the states of padding.

Hidden states are padded again with other states than stock's. What a module makes of attended tokens must not change
with them: a convolution or a mean over all tokens of a text does.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import MethodType

import torch
from sentence_transformers.base.modules import Transformer
from sentence_transformers.multi_vector_encoder import MultiVectorEncoder
from torch import Tensor, nn
from torch.func import functional_call

from pylate_fastmaxsim.integrations.encoding.equivalence import alike, untouched, what_fails
from pylate_fastmaxsim.integrations.patching.provenance import defined_in

# States of padding in the check, relative to those of tokens: so large that a maximum over tokens shows as well.
_LARGE = 10


def reader_of_padding(
    model: MultiVectorEncoder, transformer: Transformer, features: dict[str, Tensor], kwargs: dict
) -> str | None:
    """Name the part of a model that reads the states of padding, as a part of a sentence; None if none does.

    The model runs as it is, in training, on the same random numbers each time: with the encoder's states and with
    others in the place of padding; then again with noise as the weights behind the encoder, since a convolution whose
    weights are 0 now may be trained.

    Parameters
    ----------
    model
        The whole model.
    transformer
        The encoder in it, which returns hidden states ``[N, L, d]``.
    features
        Tokenized texts, some of them with padding.
    kwargs
        Keywords that the model is called with.
    """
    found: list[str] = []
    padding = features["attention_mask"][..., None] == 0

    def trial() -> None:
        for weights in ({}, _noise_behind(model, transformer)):
            states, expected = _run(model, transformer, features, kwargs, weights)
            others = torch.where(padding, _LARGE * states.flip(0, 1), states)
            _, made = _run(model, transformer, features, kwargs, weights, others)
            found.extend(
                f"{type(module).__name__} reads the states of padding"
                for module, output in expected.items()
                if output.keys() != made[module].keys()
                or not all(alike(made[module][key], output[key]) for key in output)
            )

    failed = what_fails(
        trial, features["input_ids"].device, "the model cannot be run with other states of padding ({})"
    )
    return next(iter(found), failed)


def _noise_behind(model: nn.Module, transformer: nn.Module) -> dict[str, Tensor]:
    encoder = set(map(id, transformer.parameters()))
    behind = ((name, weight) for name, weight in model.named_parameters() if id(weight) not in encoder)
    return {name: torch.randn_like(weight) for name, weight in behind if weight.is_floating_point()}


def _run(
    model: nn.Module,
    transformer: Transformer,
    features: dict[str, Tensor],
    kwargs: dict,
    weights: dict[str, Tensor],
    states: Tensor | None = None,
) -> tuple[Tensor, dict[nn.Module, dict[str, Tensor]]]:
    """Hidden states ``[N, L, d]`` of the encoder, or others in their place, and what each module makes of attended tokens."""
    made: dict[nn.Module, dict[str, Tensor]] = {}
    encoded: list[Tensor] = []

    def replace(_module: nn.Module, _args: tuple, output: dict[str, Tensor]) -> None:
        name = transformer.module_output_name
        output[name] = output[name] if states is None else states
        encoded.append(output[name].clone())

    def record(module: nn.Module, _args: tuple, output: dict[str, Tensor]) -> None:
        made[module] = _of_attended_tokens(output)

    device = features["input_ids"].device
    with ExitStack() as stack:
        stack.enter_context(untouched(model))
        stack.enter_context(_inside_of_accelerate(model))
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.random.fork_rng([device] if device.type == "cuda" else []))
        # Reentrant checkpointing warns of inputs without gradients.
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", "None of the inputs have requires_grad=True")
        stack.callback(transformer.register_forward_hook(replace).remove)
        for module in (*model.children(), model):
            stack.callback(module.register_forward_hook(record).remove)
        # Copies of buffers: to write to those that batch norm has would break a backward that is still to come.
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        # Tied, weights of a module that stands in two routes would be replaced twice, and put back once.
        functional_call(model, {**buffers, **weights}, (dict(features),), kwargs, tie_weights=False)
    return encoded[0], made


@contextmanager
def _inside_of_accelerate(model: nn.Module) -> Iterator[None]:
    """Context in which a model has the forward inside the one that accelerate gave it.

    That one is running, and its autocast is one object: entered twice, it would stay on.
    """
    inner = prepared = vars(model).get("forward")
    while defined_in(inner, ("accelerate", "torch")) and hasattr(inner, "__wrapped__"):
        inner = inner.__wrapped__
    if inner is prepared:
        yield
        return
    model.forward = MethodType(inner, model) if isinstance(prepared, MethodType) else inner
    try:
        yield
    finally:
        model.forward = prepared


def _of_attended_tokens(output: dict[str, Tensor]) -> dict[str, Tensor]:
    mask = output["attention_mask"] != 0
    return {
        key: (value[mask] if value.shape[:2] == mask.shape else value).clone()
        for key, value in output.items()
        if torch.is_tensor(value)
    }
