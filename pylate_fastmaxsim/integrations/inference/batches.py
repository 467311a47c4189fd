"""Texts in batches of tokens, tokenised while another batch is encoded.

The hosts encode in batches of texts, and between two of them a GPU waits for the tokenizer. Here a thread tokenises the
texts that come next, sorted by length as the hosts sort them, and a batch holds as many texts as its tokens allow.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor
from tqdm.autonotebook import tqdm

from pylate_fastmaxsim.integrations.encoding.plans import rows_of
from pylate_fastmaxsim.integrations.encoding.token_counts import TOKEN_TOTAL, TokenCounts, has_gaps, take_total
from pylate_fastmaxsim.integrations.patching.fallback import FallbackToHost

Features = dict[str, Tensor]
Made = TypeVar("Made")

# With these a GPU has enough to do; the caches of a CPU hold fewer.
MOST_TOKENS, MOST_TOKENS_ON_CPU = 2**15, 2**12
MOST_TEXTS = 4096
# Tokens, with padding, of the texts that are sorted by their number before a CPU encodes them: 32 MiB.
MOST_TOKENIZED = 2**21
# Batches that are tokenised before they are needed.
_AHEAD = 2
# The check on a model's first batch runs it with other weights, which no other thread may see.
_running = threading.RLock()


def embedded_batches(
    texts: Sequence[object],
    tokenize: Callable[[list], Features],
    embed: Callable[[Features], Made],
    *,
    text_length: Callable[[object], int],
    device: torch.device,
    batch_size: int,
    longest: int,
    most_texts: int = MOST_TEXTS,
    fixed_width: bool = False,
    progress: str | None = None,
) -> Iterator[tuple[list[int], Made]]:
    """Texts from the longest to the shortest, in batches that hold about equally many tokens, padding included.

    Of each batch it yields the places of its texts among all, and what ``embed`` makes of their features on the device.

    ``batch_size`` bounds memory as in the hosts: a batch has at most the tokens of so many documents of the ``longest``
    length that the model takes, and at most 32,768, on a CPU 4,096. A single text may have more. ``tokenize`` gives
    features on the CPU, and runs in another thread. ``text_length`` estimates a length before. Texts are cut to the longest
    of their batch, but not with a ``fixed_width``, as of queries. ``progress`` says what a bar shows, None shows none. Raises
    FallbackToHost where features say nothing of attention.
    """
    # Sentence Transformers 5 adds up the lengths of all characters of a string, which takes longer than to encode it.
    lengths = [len(text) if isinstance(text, str) else text_length(text) for text in texts]
    order = sorted(range(len(texts)), key=lengths.__getitem__, reverse=True)
    budget = max(1, min(batch_size * longest, MOST_TOKENS_ON_CPU if device.type == "cpu" else MOST_TOKENS))

    def tokenized() -> Iterator[tuple[list[int], Features]]:
        begin, width = 0, longest
        while begin < len(order):
            # A CPU has nothing to wait for, and padding costs it most: its batches are made of many texts.
            at_once = MOST_TOKENIZED if device.type == "cpu" else budget
            indices = order[begin : begin + max(1, min(most_texts, at_once // width))]
            features = tokenize([texts[index] for index in indices])
            if (mask := features.get("attention_mask")) is None:
                raise FallbackToHost("its features have no attention_mask")
            widths = [features["input_ids"].shape[1]] * len(indices)
            # A mask with gaps, or with padding on the left, cannot be packed, and is found without counts.
            gaps, rows = has_gaps(mask), torch.arange(len(indices), device="cpu")
            if not (gaps or fixed_width):
                # A text of fewer characters may have more tokens.
                tokens, rows = mask.sum(dim=1).sort(descending=True, stable=True)
                widths = tokens.clamp(min=1).tolist()
            begin, first = begin + len(indices), 0
            while first < len(indices):
                width = widths[first]
                chosen = rows[first : first + max(1, budget // width)]
                part = _cut(rows_of(features, chosen), width)
                if not gaps:
                    part[TOKEN_TOTAL] = TokenCounts.of(part["attention_mask"])
                yield [indices[row] for row in chosen.tolist()], _pinned(part) if device.type == "cuda" else part
                first += len(chosen)

    with tqdm(total=len(texts), desc=progress, unit=" texts", disable=progress is None) as bar:
        for indices, features in _ahead(tokenized()):
            moved = {
                key: value.to(device, non_blocking=True) if torch.is_tensor(value) else value
                for key, value in features.items()
            }
            take_total(moved)
            yield indices, _embedded(embed, moved, batch_size)
            bar.update(len(indices))


def _embedded(embed: Callable[[Features], Made], features: Features, batch_size: int) -> Made:
    try:
        with _running:
            return embed(features)
    except torch.OutOfMemoryError as error:
        count, width = features["input_ids"].shape
        raise torch.OutOfMemoryError(
            f"encode: out of memory with {count} texts of at most {width} tokens in a batch. Give encode a smaller "
            f"batch_size than {batch_size}: a batch holds the tokens of so many documents of the greatest length. "
            f"({error})"
        ) from error


def _ahead(items: Iterator) -> Iterator:
    """The same items; all but the first, before which nothing runs, are made in another thread."""
    with ThreadPoolExecutor(1) as thread:
        item, coming = next(items, None), deque()
        while item is not None:
            coming.extend(thread.submit(next, items, None) for _ in range(_AHEAD - len(coming)))
            yield item
            item = coming.popleft().result()


def _cut(features: Features, width: int) -> Features:
    """Texts without the padding behind a width."""
    whole = features["input_ids"].shape[1:]
    return {
        key: value[:, :width] if torch.is_tensor(value) and value.shape[1:2] == whole else value
        for key, value in features.items()
    }


def _pinned(features: Features) -> Features:
    """Where a copy to a GPU does not wait for what runs there."""
    return {key: value.pin_memory() if torch.is_tensor(value) else value for key, value in features.items()}
