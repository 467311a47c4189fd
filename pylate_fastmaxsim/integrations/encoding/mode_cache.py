"""What is decided once about a model: by each rank of a distributed run, or by all together where they run in step."""

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

# Of what this rank found, what all ranks act on.
Agree = Callable[[bool], bool]

Decision = TypeVar("Decision")

# What a decision is about: it is made again where one of these changes.
Decisions = WeakKeyDictionary[nn.Module, dict[Hashable, Decision]]


def decided(
    decisions: Decisions[Decision],
    model: nn.Module,
    columns: Sequence[dict[str, Tensor]],
    decide: Callable[[Agree], Decision],
    group: dist.ProcessGroup | None,
    more: Hashable,
) -> Decision:
    """What ``decide`` finds when a model is first met in a situation.

    Parameters
    ----------
    decisions
        Those made so far, by the model inside what is wrapped around it.
    model
        A ``pylate.models.ColBERT``, possibly wrapped.
    columns
        The tokenized texts that it is given.
    decide
        Makes the decision, given how to agree with the other ranks.
    group
        The ranks of a distributed run that decide together; ``None`` where each decides by itself.
    more
        What else the decision is about.
    """
    core = unwrap(model)
    device = columns[0]["input_ids"].device
    situation = (
        # Ranks that decide together do so also after one of them has used the model alone.
        group is not None,
        *(type(layer) for layer in layers_of_wrapping(model)),
        counts_checkpoints(model),
        core.training,
        device.type,
        torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type),
        # accelerate replaces this attribute to switch mixed precision on; others may replace it in every step.
        id(vars(core).get("forward")) if has_class_forward(core) else "replaced",
        *_state(core),
        # Much wider batches may have longer documents than were looked at; no rank may decide without the others.
        0 if group else holds_up_to(max(column["input_ids"].shape[1] for column in columns)),
        more,
    )
    found = decisions.setdefault(core, {})
    if situation not in found:
        # A few calls of odd shapes, not worth compiling for.
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
    """The width of batches up to which a decision about one of ``width`` tokens holds.

    Examples
    --------
    >>> [holds_up_to(width) for width in (1, 256, 257, 300)]
    [1, 256, 512, 512]
    """
    return 1 << (width - 1).bit_length()


def calls_of_all_ranks(calls: int, texts: int, device: torch.device, group: dist.ProcessGroup) -> int:
    """How many mini-batches all ranks make: as many as the one that makes most. Waits for the device.

    Parameters
    ----------
    calls, texts
        Of this rank: the mini-batches that it would make, and the texts that it has for them.

    Raises
    ------
    ValueError
        On all ranks alike: one of them has fewer texts.
    """
    most, fewest = _most_of_all_ranks([calls, -texts], device, group)
    if most > -fewest:
        raise ValueError(
            f"One process divides its batch into {most} mini-batches, and another has only {-fewest} texts to divide, "
            "but all must make equally many: train with dataloader_drop_last=True, or raise mini_batch_size."
        )
    return most


def least_of_all_ranks(count: int, device: torch.device, group: dist.ProcessGroup) -> int:
    """The smallest of the numbers that the ranks of a group have. Waits for the device."""
    return -_most_of_all_ranks([-count], device, group)[0]


def _most_of_all_ranks(numbers: list[int], device: torch.device, group: dist.ProcessGroup) -> list[int]:
    reduced = torch.tensor(numbers, device=device)
    dist.all_reduce(reduced, dist.ReduceOp.MAX, group)
    return reduced.tolist()


def _on_all_ranks(here: bool, device: torch.device, group: dist.ProcessGroup) -> bool:
    return bool(least_of_all_ranks(int(here), device, group))


def _state(core: nn.Module) -> tuple[Hashable, ...]:
    """What users change of a model between batches.

    Of its modules, which there are and, behind the encoder, which are in training; of the encoder, which it is and in
    what, the dtype of its parameters, its attention, and NEFTune's noise.
    """
    children = list(unsharded(core).children())
    flags = [module.training for child in children[1:] for module in child.modules()]
    try:
        encoder = encoder_of(core)
        noise = getattr(encoder.get_input_embeddings(), "neftune_noise_alpha", None)
        dtype = next(encoder.parameters()).dtype
        # PEFT, which may be wrapped around it later, may put tokens before each text.
        around = ref(with_adapters(core))
        of_encoder = ref(encoder), around, encoder.training, dtype, encoder.config._attn_implementation, noise
    except (AttributeError, NotImplementedError, StopIteration):  # no encoder that could be packed
        of_encoder = ()
    # Not by id, which a module may have after one that is gone.
    return *map(ref, children), *flags, *of_encoder
