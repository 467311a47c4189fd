"""Token counts of texts: a collator adds them to its batch, and the trainer takes them out again."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps

from torch import Tensor

from pylate_fastmaxsim.integrations.encoding.batch import has_gaps
from pylate_fastmaxsim.integrations.encoding.token_counts import TOKEN_TOTAL, TokenCounts, attach_token_counts
from pylate_fastmaxsim.integrations.options import current_options
from pylate_fastmaxsim.integrations.patching.patches import Patch

_MASK = "_attention_mask"


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
        return add_token_counts(batch)

    @wraps(trainer._prepare_inputs)
    def prepare_inputs(self: object, inputs: object) -> object:
        batch = stock_prepare(self, inputs)
        # A compute_loss and a loss see the batch of stock's collator. Here, not where the trainer divides it into columns:
        # there `negative` also gets the keys of a column `negative_1`. A user's collator may return another type than dict.
        return attach_token_counts(batch) if isinstance(batch, dict) else batch

    return Patch(collator, "__call__", collate), Patch(trainer, "_prepare_inputs", prepare_inputs)


def add_token_counts(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The batch, with counts beside the mask of every column.

    Counting on the CPU, in a worker, spares waiting for the GPU.

    Examples
    --------
    >>> import torch
    >>> add_token_counts({"query_attention_mask": torch.tensor([[1, 1, 0], [1, 0, 0]])})["query_token_total"].tolist()
    [[2, 3], [1, 3]]
    """
    for key in [key for key in batch if key.endswith(_MASK)]:
        # A mask with gaps cannot be packed, and is found without counts.
        if not has_gaps(batch[key]):
            batch[f"{key.removesuffix(_MASK)}_{TOKEN_TOTAL}"] = TokenCounts.of(batch[key])
    return batch


def _method(owner: type, name: str) -> Callable:
    """A method as a class has it now; an inherited one is looked up in each call, since it may be replaced later."""
    if name in vars(owner):
        return vars(owner)[name]
    return lambda self, *args: getattr(super(owner, self), name)(*args)
