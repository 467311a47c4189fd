"""Decisions about a model that are made once: by each rank, or by all ranks that have to make the same calls."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import TypeVar
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pylate_fastmaxsim.integrations.models.encoders import checkpoints_layers, encoder_of, with_adapters
from pylate_fastmaxsim.integrations.models.user_code import has_class_forward
from pylate_fastmaxsim.integrations.models.wrappers import layers_of_wrapping, unsharded, unwrap

# From what this rank found to what all ranks found.
Agree = Callable[[bool], bool]

Decision = TypeVar("Decision")

# A decision is made again if one part of its key changes.
Decisions = WeakKeyDictionary[nn.Module, dict[Hashable, Decision]]


def decided(
    decisions: Decisions[Decision],
    model: nn.Module,
    columns: Sequence[dict[str, Tensor]],
    decide: Callable[[Agree], Decision],
    group: dist.ProcessGroup | None,
    more: Hashable,
) -> Decision:
    """The decision about a model in its present state, made at first use.

    Parameters
    ----------
    decisions
        Those made so far, by unwrapped model.
    model
        A ``pylate.models.ColBERT``, possibly wrapped.
    columns
        The tokenized texts that it is given.
    decide
        Makes the decision, given a function to agree with the other ranks.
    group
        The ranks that decide together; ``None`` if each decides by itself.
    more
        What else the decision depends on.
    """
    core = unwrap(model)
    device = columns[0]["input_ids"].device
    situation = (
        # One rank may have used the model alone before all decide together.
        group is not None,
        *(type(layer) for layer in layers_of_wrapping(model)),
        counts_checkpoints(model),
        core.training,
        device.type,
        torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type),
        # accelerate replaces this attribute for mixed precision. Users may replace it in every step.
        id(vars(core).get("forward")) if has_class_forward(core) else "replaced",
        *state_of(core),
        # Much wider batches may have longer documents than the check had. A rank must not decide about them alone.
        0 if group else holds_up_to(max(column["input_ids"].shape[1] for column in columns)),
        more,
    )
    found = decisions.setdefault(core, {})
    if situation not in found:
        # The check makes a few calls of odd shapes, which are not worth compiling.
        with torch.compiler.set_stance("force_eager"):
            found[situation] = decide(partial(_on_all_ranks, device=device, group=group) if group else bool)
    return found[situation]


def counts_checkpoints(model: nn.Module) -> bool:
    """Whether DistributedDataParallel with ``static_graph`` counts the calls of layers that are checkpointed."""
    *around, core = layers_of_wrapping(model)
    if not any(getattr(layer, "static_graph", False) for layer in around):
        return False
    try:
        return checkpoints_layers(core)
    except AttributeError:  # no encoder that could be packed
        return False


def holds_up_to(width: int) -> int:
    """Up to which width of batches a decision holds that was made for ``width``: the next power of two.

    Examples
    --------
    >>> [holds_up_to(width) for width in (1, 256, 257, 300)]
    [1, 256, 512, 512]
    """
    return 1 << (width - 1).bit_length()


def calls_of_all_ranks(calls: int, texts: int, device: torch.device, group: dist.ProcessGroup) -> int:
    """The largest number of mini-batches that a rank needs. Waits for the device.

    Parameters
    ----------
    calls, texts
        The mini-batches that this rank would make, and its number of texts.

    Raises
    ------
    ValueError
        On all ranks: one of them has fewer texts than mini-batches.
    """
    most, fewest = _most_of_all_ranks([calls, -texts], device, group)
    if most > -fewest:
        raise ValueError(
            f"One process divides its batch into {most} mini-batches, and another has only {-fewest} texts to divide. "
            "All must make equally many: train with dataloader_drop_last=True, or raise mini_batch_size."
        )
    return most


def least_of_all_ranks(count: int, device: torch.device, group: dist.ProcessGroup) -> int:
    """The smallest number of a rank. Waits for the device."""
    return -_most_of_all_ranks([-count], device, group)[0]


def _most_of_all_ranks(numbers: list[int], device: torch.device, group: dist.ProcessGroup) -> list[int]:
    reduced = torch.tensor(numbers, device=device)
    dist.all_reduce(reduced, dist.ReduceOp.MAX, group)
    return reduced.tolist()


def _on_all_ranks(here: bool, device: torch.device, group: dist.ProcessGroup) -> bool:
    return bool(least_of_all_ranks(int(here), device, group))


def state_of(core: nn.Module) -> tuple[Hashable, ...]:
    """What users change in a model between batches.

    Its modules and, behind the encoder, all in them and which are in training; the encoder, PEFT around it, the dtype
    of its parameters, its attention, and NEFTune's noise.
    """
    children = list(unsharded(core).children())
    behind = [(ref(module), module.training) for child in children[1:] for module in child.modules()]
    try:
        encoder = encoder_of(core)
        noise = getattr(encoder.get_input_embeddings(), "neftune_noise_alpha", None)
        dtype = next(encoder.parameters()).dtype
        # PEFT may be wrapped around it later, and may put tokens before each text.
        around = ref(with_adapters(core))
        of_encoder = ref(encoder), around, encoder.training, dtype, encoder.config._attn_implementation, noise
    except (AttributeError, NotImplementedError, StopIteration):  # no encoder that could be packed
        of_encoder = ()
    # Weak references, not ids, which are used again after a module is gone.
    return *map(ref, children), *behind, *of_encoder
