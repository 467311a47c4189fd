"""Attention of packed texts on one GPU: this package's kernels against PyTorch's FlashAttention, forward and backward.

    python -m benchmarks attention

Shapes of ModernBERT-base (12 heads of 64 dimensions, bf16; 14 of its 22 layers have a window of 64 tokens to each
side, the others none) with about 40,000 tokens. Both run on every shape, even where `is_faster` chooses FlashAttention.
Further cells have heads of other sizes, and dropout.
"""

from __future__ import annotations

import argparse
import itertools
import random
from functools import partial

import torch

from benchmarks.harness.lengths import log_normal
from benchmarks.harness.timing import DEVICE, time_calls
from pylate_fastmaxsim.ops.encoder.attention import is_faster, text_attention

PROCESS_OF = ()
DIM = 64
WINDOWS = (64, -1)
# Heads of each size, as in MiniLM (384 numbers) and in encoders of 768.
HEADS = {32: 12, 64: 12, 96: 8, 128: 6}
DROPOUTS = (0.0, 0.1)
# Of these shapes all sizes of heads are measured, without a window.
SHAPES_OF_HEADS = ("256 queries, 512 documents of 80", "512 documents of 80", "256 documents of 150")


def drawn_lengths(mean: float, count: int, draw: random.Random) -> list[int]:
    """Lengths as in training/encoder.py: three special tokens, 300 tokens at most."""
    return [min(300, 3 + max(1, log_normal(mean - 3, draw))) for _ in range(count)]


def shapes() -> dict[str, tuple[list[int], list[int]]]:
    """Rows and keys of every text. All 32 rows of an expanded query attend to its words alone."""
    draw = random.Random(0)
    documents = drawn_lengths(80, 512, draw)
    words = [draw.randint(8, 15) for _ in range(256)]
    found = {
        "256 queries, 512 documents of 80": (
            documents + [32, 0] * 256,
            documents + [keys for count in words for keys in (count, 32 - count)],
        ),
        "512 documents of 80": (documents, documents),
    }
    for mean, count in ((40, 1024), (150, 256)):
        lengths = drawn_lengths(mean, count, draw)
        found[f"{count} documents of {mean}"] = lengths, lengths
    for length, count in ((32, 1280), (64, 640), (128, 320), (180, 228), (300, 136), (1024, 40)):
        found[f"{count} texts of {length} each"] = [length] * count, [length] * count
    return found


def cells(options: argparse.Namespace) -> dict[str, dict]:
    """Cells of windows and of heads; one process measures them all."""
    made = {}
    for name, reach in itertools.product(shapes(), WINDOWS):
        made[f"{name}, window {reach}"] = {"shape": name, "reach": reach, "dim": DIM, "dropout": 0.0}
    for name, dim, dropout in itertools.product(SHAPES_OF_HEADS, HEADS, DROPOUTS):
        cell = {"shape": name, "reach": -1, "dim": dim, "dropout": dropout}
        made[f"{name}, {HEADS[dim]} heads of {dim}, dropout {dropout}"] = cell
    return made


def measure(cell: dict) -> dict:
    """Forward and backward of both ways."""
    (rows, keys), dim, dropout, reach = shapes()[cell["shape"]], cell["dim"], cell["dropout"], cell["reach"]
    torch.manual_seed(0)
    borders, key_borders = (torch.tensor([0, *lengths]).cumsum(0).int().to(DEVICE) for lengths in (rows, keys))
    longest = max(rows + keys)
    made = partial(torch.randn, device=DEVICE, dtype=torch.bfloat16)
    # Rotary embeddings leave queries and keys with the heads outermost in memory.
    query, key = (made(HEADS[dim], sum(lengths), dim).transpose(0, 1) for lengths in (rows, keys))
    leaves = [values.requires_grad_() for values in (query, key, made(sum(keys), HEADS[dim], dim))]
    gradient = made(sum(rows), HEADS[dim], dim)
    scale = dim**-0.5
    ways = {
        "flash": lambda: torch.ops.aten._flash_attention_forward(
            *leaves, borders, key_borders, longest, longest, dropout, False, False,
            scale=scale, window_size_left=reach, window_size_right=reach,
        )[0],
        "ours": lambda: text_attention(*leaves, borders, key_borders, longest, scale, reach, dropout),
    }  # fmt: skip
    chosen = is_faster(query, key, borders, longest, (reach, reach), dropout)
    row = {"texts": len(rows), "rows": sum(rows), "keys": sum(keys), "longest": longest, "chosen": chosen}
    for name, forward in ways.items():
        states = forward()
        backward = partial(torch.autograd.grad, states, leaves, gradient, retain_graph=True)
        calls = {"forward": forward, "backward": backward}
        row[name] = {part: time_calls([call]) for part, call in calls.items()}
    return row
