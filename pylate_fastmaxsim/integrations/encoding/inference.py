"""Encode many texts outside of training: tokenised ahead, in batches of tokens, copied out while the next one runs.

The hosts encode in batches of texts. Between two of them a GPU waits for the tokenizer; behind each one it is waited for
once a text, to choose its rows, normalise them and copy them. Here a thread tokenises the texts that come next, sorted by
length as the hosts sort them; a batch holds as many texts as its tokens allow; what is made of rows is made of all rows of
a batch at once; and another thread takes them to the host.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor
from tqdm.autonotebook import tqdm

from pylate_fastmaxsim.integrations.encoding.plans import rows_of
from pylate_fastmaxsim.integrations.encoding.token_counts import TOKEN_TOTAL, TokenCounts, has_gaps, take_total
from pylate_fastmaxsim.integrations.patching.fallback import FallbackToHost

Features = dict[str, Tensor]
Made = TypeVar("Made")

# With more tokens in a batch a GPU is no busier: a forward of ModernBERT-base takes 30 ms of an H100. The caches of a CPU
# hold fewer.
MOST_TOKENS, MOST_TOKENS_ON_CPU = 2**15, 2**12
# Batches that are tokenised before they are needed, and batches whose rows may be on their way to the host.
_AHEAD = 2


@dataclass(frozen=True)
class Batch:
    """Tokenized texts on the device of a model."""

    indices: list[int]  # of the texts among all
    features: Features
    tokens: list[int]  # attended ones of each text
    batch_size: int  # as the host was given it

    def embedded(self, embed: Callable[[Batch], Made]) -> Made:
        """What ``embed`` makes of it. Of a batch that does not fit OutOfMemoryError says how to have smaller ones."""
        try:
            return embed(self)
        except torch.OutOfMemoryError as error:
            count, width = self.features["input_ids"].shape
            raise torch.OutOfMemoryError(
                f"encode: out of memory with {count} texts of at most {width} tokens in a batch. Give encode a smaller "
                f"batch_size than {self.batch_size}: a batch holds the tokens of so many texts of the greatest length. "
                f"({error})"
            ) from error


def batches(
    texts: Sequence[object],
    tokenize: Callable[[list], Features],
    *,
    text_length: Callable[[object], int],
    device: torch.device,
    batch_size: int,
    longest: int,
    most_texts: int = 4096,
    progress: str | None = None,
) -> Iterator[Batch]:
    """Texts from the longest to the shortest, in batches that hold about equally many tokens, padding included.

    ``batch_size`` bounds memory as in the hosts: a batch has at most the tokens of so many texts of the ``longest``
    length that the model takes, and at most 32,768, on a CPU 4,096. A single text may have more. ``tokenize`` gives
    features on the CPU, and runs in another thread. ``text_length`` estimates a length before. ``progress`` says what a bar
    shows, None shows none. Raises FallbackToHost where features say nothing of attention.
    """
    # Of a string what the hosts take, some of which add up its characters.
    lengths = [len(text) if isinstance(text, str) else text_length(text) for text in texts]
    order = sorted(range(len(texts)), key=lengths.__getitem__, reverse=True)
    budget = max(1, min(batch_size * longest, MOST_TOKENS_ON_CPU if device.type == "cpu" else MOST_TOKENS))

    def tokenized() -> Iterator[tuple[list[int], Features]]:
        begin, width = 0, longest
        while begin < len(order):
            indices = order[begin : begin + max(1, min(most_texts, budget // width))]
            features = tokenize([texts[index] for index in indices])
            if (mask := features.get("attention_mask")) is None:
                raise FallbackToHost("its features have no attention_mask")
            # A mask with gaps, or with padding on the left, cannot be packed, and is found without counts.
            if not has_gaps(mask):
                features[TOKEN_TOTAL] = TokenCounts.of(mask)
            begin, width = begin + len(indices), max(1, features["input_ids"].shape[1])
            # A text of fewer characters may have more tokens.
            size = max(1, budget // width)
            for first in range(0, len(indices), size):
                part = rows_of(features, first, first + size)
                yield indices[first : first + size], _pinned(part) if device.type == "cuda" else part

    with tqdm(total=len(texts), desc=progress, unit=" texts", disable=progress is None) as bar:
        for indices, features in _ahead(tokenized()):
            tokens = features["attention_mask"].sum(dim=1).tolist()
            moved = {
                key: value.to(device, non_blocking=True) if torch.is_tensor(value) else value
                for key, value in features.items()
            }
            take_total(moved)
            yield Batch(indices, moved, tokens, batch_size)
            bar.update(len(indices))


def _ahead(items: Iterator) -> Iterator:
    """The same items; all but the first, before which nothing runs, are made in another thread."""
    with ThreadPoolExecutor(1) as thread:
        item, coming = next(items, None), deque()
        while item is not None:
            coming.extend(thread.submit(next, items, None) for _ in range(_AHEAD - len(coming)))
            yield item
            item = coming.popleft().result()


def _pinned(features: Features) -> Features:
    """Where a copy to a GPU does not wait for what runs there."""
    return {key: value.pin_memory() if torch.is_tensor(value) else value for key, value in features.items()}


@dataclass(frozen=True)
class Rows:
    """What a model of late interaction makes of a batch: rows ``values`` ``[R, d]``, one text after the other."""

    values: Tensor
    keep: Tensor  # which of the rows are wanted, [R], bool
    lengths: Sequence[int]  # rows of each text, those that are not wanted included

    def of_texts(self) -> list[Tensor]:
        """The wanted rows of each text, views of one tensor. Waits for the device."""
        ends = np.cumsum([0, *self.lengths])
        wanted = np.concatenate([[0], self.keep.cpu().numpy().cumsum()])[ends]
        return list(self.values[self.keep].split(np.diff(wanted).tolist()))


def rows_of_texts(
    count: int, batches: Iterator[Batch], embed: Callable[[Batch], Rows], *, to_host: bool
) -> list[Tensor]:
    """The wanted rows ``[L, d]`` of ``count`` texts in their order, on the device of the model or ``to_host``."""
    found: list = [None] * count
    coming: deque[tuple[list[int], Future[list[Tensor]]]] = deque()

    def take(most: int) -> None:
        while len(coming) > most:
            indices, rows = coming.popleft()
            for index, own in zip(indices, rows.result(), strict=True):
                found[index] = own

    # Closed, it tokenises no more, whoever still holds an error.
    with closing(batches), ThreadPoolExecutor(1) as thread, torch.no_grad():
        for batch in batches:
            rows = batch.embedded(embed)
            coming.append((batch.indices, _texts_on_host(rows, thread) if to_host else _done(rows.of_texts())))
            take(_AHEAD)
        take(0)
    return found


def _texts_on_host(rows: Rows, thread: ThreadPoolExecutor) -> Future[list[Tensor]]:
    if not rows.values.is_cuda:
        return _done(rows.of_texts())
    # Into pinned memory, which is used again: what a caller keeps lies in memory of its own.
    copied = replace(rows, values=_copied(rows.values), keep=_copied(rows.keep))
    ready = torch.cuda.Event()
    ready.record(torch.cuda.current_stream(rows.values.device))

    def wait() -> list[Tensor]:
        ready.synchronize()
        return copied.of_texts()

    return thread.submit(wait)


def _copied(values: Tensor) -> Tensor:
    return torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=True).copy_(values, non_blocking=True)


def _done(result: list[Tensor]) -> Future[list[Tensor]]:
    done: Future[list[Tensor]] = Future()
    done.set_result(result)
    return done
