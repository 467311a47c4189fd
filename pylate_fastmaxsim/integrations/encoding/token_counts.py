"""Counts of the tokens of each text, made by the host's collator, so that nobody waits for the GPU to count."""

from __future__ import annotations

from collections import deque
from copy import copy

import torch
from torch import Tensor
from torch.utils import _pytree

from pylate_fastmaxsim.integrations.encoding.masks import writes_to

# Behind the name of a column: the key of its counts in a batch.
TOKEN_TOTAL = "token_total"

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
        args, kwargs = _pytree.tree_map_only(Tensor, _on_cpu, (args, kwargs or {}))
        return super().__torch_function__(function, types, args, kwargs)

    def __deepcopy__(self, memo: dict) -> TokenCounts:
        return self.clone()


def _on_cpu(tensor: Tensor) -> Tensor:
    return tensor if isinstance(tensor, TokenCounts) else tensor.cpu()


def attach_token_counts(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Take the counts out of a batch, for its masks to carry them until somebody makes others of these."""
    counted = {
        mask: counts
        for mask in batch
        if mask.endswith("_attention_mask") and (counts := mask.removesuffix("attention_mask") + TOKEN_TOTAL) in batch
    }
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
    attended = attention_mask != 0
    return (attended.sum() == total) & ~(attended[:, 1:] & ~attended[:, :-1]).any()


def verify_async(attention_mask: Tensor, total: int) -> None:
    """Check asynchronously that a count of tokens matches the mask. A later call raises if it does not.

    Raises
    ------
    ValueError
        The count of an earlier batch did not match.
    """
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
