"""Counts of the tokens of each text, so that nobody waits for the GPU to count.

The host's collator adds them to its batch, the trainer takes them out again, and masks carry them from there on.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from copy import copy
from functools import wraps

import torch
from torch import Tensor
from torch.utils import _pytree

from pylate_fastmaxsim.integrations.encoding.masks import writes_to
from pylate_fastmaxsim.integrations.options import current_options
from pylate_fastmaxsim.integrations.patching.patches import Patch

# Behind the name of a column: the key of its counts in a batch.
TOKEN_TOTAL = "token_total"
_MASK = "_attention_mask"

# What moves a batch to a GPU leaves counts where they are.
_MOVES = {Tensor.to, Tensor.cuda, Tensor.cpu, Tensor.pin_memory}


class TokenCounts(Tensor):
    """Attended tokens of each text, and the width of its mask: ``[N, 2]``, int64, always on the CPU.

    A tensor with a row for each text, because trainers treat every value of a batch as one. Whoever splits, picks,
    reorders or joins the rows of everything in a column does so with its counts, and they stay right. Indices on a GPU
    are copied to the CPU for that, which waits for the GPU.

    Examples
    --------
    >>> counts = TokenCounts.of(torch.tensor([[1, 1, 0], [1, 0, 0]]))
    >>> counts.tolist(), counts.to("meta").device
    ([[2, 3], [1, 3]], device(type='cpu'))
    >>> torch.cat([counts[1:], counts]).tolist()
    [[1, 3], [2, 3], [1, 3]]
    """

    @classmethod
    def of(cls, attention_mask: Tensor) -> TokenCounts:
        """Count the tokens of a mask ``[N, L]``, which is on the CPU."""
        attended = (attention_mask != 0).sum(dim=1)
        return torch.stack([attended, torch.full_like(attended, attention_mask.shape[1])], dim=1).as_subclass(cls)

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function in _MOVES:
            return args[0]
        args, kwargs = _pytree.tree_map_only(
            Tensor, lambda each: each if isinstance(each, cls) else each.cpu(), (args, kwargs or {})
        )
        return super().__torch_function__(function, types, args, kwargs)

    def __deepcopy__(self, memo: dict) -> TokenCounts:
        return self.clone()


def counting_tokens_of_batches(collator: type, trainer: type, by_rank: bool = True) -> tuple[Patch, Patch]:
    """The patches of a host's collator and of its trainer. ``by_rank``: also where there are several ranks."""
    stock_collate, stock_prepare = _method(collator, "__call__"), _method(trainer, "_prepare_inputs")

    # A worker with start method spawn imports the host afresh and adds no counts.
    @wraps(collator.__call__)
    def collate(self: object, features: list[dict]) -> dict[str, Tensor]:
        batch, options = stock_collate(self, features), current_options()
        # A subclass with its own __call__ may change the masks afterwards.
        if options is None or not options.padding_free or type(self).__call__ is not collate:
            return batch
        # Of a streamed dataset one process hands batches to all others, by NCCL, which takes nothing that stays on the CPU.
        if not by_rank and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            return batch
        # Counted on the CPU, in a worker, nothing waits for the GPU.
        for key in [key for key in batch if key.endswith(_MASK)]:
            # A mask with gaps cannot be packed, and is found without counts.
            if not has_gaps(batch[key]):
                batch[f"{key.removesuffix(_MASK)}_{TOKEN_TOTAL}"] = TokenCounts.of(batch[key])
        return batch

    @wraps(trainer._prepare_inputs)
    def prepare_inputs(self: object, inputs: object) -> object:
        batch = stock_prepare(self, inputs)
        # A compute_loss and a loss see the batch of stock's collator. Here, not where the trainer divides it into columns:
        # there `negative` also gets the keys of a column `negative_1`. A user's collator may return another type than dict.
        return attach_token_counts(batch) if isinstance(batch, dict) else batch

    return Patch(collator, "__call__", collate), Patch(trainer, "_prepare_inputs", prepare_inputs)


def _method(owner: type, name: str) -> Callable:
    """A method as a class has it now; an inherited one is looked up in each call, since it may be replaced later."""
    if name in vars(owner):
        return vars(owner)[name]
    return lambda self, *args: getattr(super(owner, self), name)(*args)


def attach_token_counts(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Take the counts out of a batch, for its masks to carry them until somebody makes others of these."""
    counts_of = {mask: f"{mask.removesuffix(_MASK)}_{TOKEN_TOTAL}" for mask in batch if mask.endswith(_MASK)}
    counted = {mask: counts for mask, counts in counts_of.items() if counts in batch}
    if not counted:
        return batch
    # A copy has the type of the batch, which a compute_loss of the user's may know.
    batch = copy(batch)
    for mask, counts in counted.items():
        _attach(batch.pop(counts), batch[mask])
    return batch


def _attach(counts: Tensor, mask: Tensor) -> None:
    mask.fastmaxsim_counts = counts, writes_to(mask)


def without_total(features: dict[str, Tensor]) -> dict[str, Tensor]:
    """A column as the host's own collator makes it."""
    return {key: value for key, value in features.items() if key != TOKEN_TOTAL}


def take_total(features: dict[str, Tensor]) -> None:
    """Take the counts of a column out of it, for its mask to carry them: a model may be given what it finds there."""
    counts = features.pop(TOKEN_TOTAL, None)
    if counts is not None and isinstance(mask := features.get("attention_mask"), Tensor):
        _attach(counts, mask)


def known_total(column: dict[str, Tensor]) -> int | None:
    """The attended tokens of a column, if it has counts that fit its mask; else None.

    On a GPU only shapes are compared. :func:`verify_async` has it check the rest.
    """
    mask = column["attention_mask"]
    counts = column.get(TOKEN_TOTAL)
    if counts is None:
        counts, writes = getattr(mask, "fastmaxsim_counts", (None, 0))
        if writes != writes_to(mask):
            return None
    # DataParallel, and accelerate where it dispatches batches, make ordinary tensors of counts.
    if not isinstance(counts, TokenCounts) or counts.dtype != torch.int64 or counts.shape != (len(mask), 2):
        return None
    attended, widths = counts.t().tolist()
    if any(width != mask.shape[1] for width in widths):
        return None
    total = sum(attended)
    return total if mask.device.type != "cpu" or matches(mask, total) else None


# Of checks that may be running: the answer on the host, and when it is there.
_answers: deque[tuple[Tensor, torch.cuda.Event]] = deque()


def matches(attention_mask: Tensor, total: int) -> Tensor:
    """Compare a mask ``[N, L]`` with a number of tokens in texts without gaps: a bool tensor on its device."""
    return ((attention_mask != 0).sum() == total) & ~_any_gap(attention_mask)


def has_gaps(attention_mask: Tensor) -> bool:
    """Check whether a row of a mask ``[N, L]``, 0/1, has a 0 before a 1. Waits for the device."""
    return bool(_any_gap(attention_mask))


def _any_gap(attention_mask: Tensor) -> Tensor:
    attended = attention_mask != 0
    return (attended[:, 1:] & ~attended[:, :-1]).any()


def verify_async(attention_mask: Tensor, total: int) -> None:
    """Check asynchronously that a count of tokens matches the mask. A later call raises ValueError if it does not."""
    if not attention_mask.is_cuda:
        return
    while _answers and _answers[0][1].query():
        answer, _ = _answers.popleft()
        if not answer:
            reset()
            raise ValueError(
                "An attention_mask of an earlier batch was changed after the collator, which had counted its tokens "
                "(pylate_fastmaxsim adds them to a column as token_total). Losses since then are wrong. Remove "
                "token_total from columns whose masks you change, or train with enable(padding_free=False)."
            )
    answer = torch.empty((), dtype=torch.bool, device="cpu", pin_memory=True)
    answer.copy_(matches(attention_mask, total), non_blocking=True)
    ready = torch.cuda.Event()
    ready.record(torch.cuda.current_stream(attention_mask.device))
    _answers.append((answer, ready))


def reset() -> None:
    """Forget the checks that are still running."""
    _answers.clear()
