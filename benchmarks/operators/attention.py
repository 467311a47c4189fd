"""Attention of packed texts on one GPU: this package's kernels against PyTorch's FlashAttention, forward and backward.

    python -m benchmarks.operators.attention                 # the table, written to results/attention.json
    python -m benchmarks.operators.attention --render-only

Shapes of ModernBERT-base (12 heads of 64 dimensions, bf16; 14 of its 22 layers have a window of 64 tokens to each
side, the others none) with about 40,000 tokens. Both run on every shape, even where `is_faster` chooses FlashAttention.
"""

from __future__ import annotations

import argparse
import json
import random
from functools import partial
from pathlib import Path

import torch

from benchmarks.harness.lengths import log_normal
from benchmarks.harness.paths import RESULTS
from benchmarks.harness.records import environment, write
from benchmarks.harness.tables import table
from benchmarks.harness.timing import time_calls
from pylate_fastmaxsim.ops.attention import is_faster, text_attention

HEADS, DIM = 12, 64
WINDOWS = (64, -1)


def drawn_lengths(mean: float, count: int, draw: random.Random) -> list[int]:
    """Lengths as in training/cell.py: three special tokens, 300 tokens at most."""
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


def measure(rows: list[int], keys: list[int], reach: int) -> dict:
    torch.manual_seed(0)
    device = torch.device("cuda")
    borders, key_borders = (torch.tensor([0, *lengths]).cumsum(0).int().to(device) for lengths in (rows, keys))
    longest = max(rows + keys)
    made = partial(torch.randn, device=device, dtype=torch.bfloat16)
    # Rotary embeddings leave queries and keys with the heads outermost in memory.
    query, key = (made(HEADS, sum(lengths), DIM).transpose(0, 1) for lengths in (rows, keys))
    leaves = [values.requires_grad_() for values in (query, key, made(sum(keys), HEADS, DIM))]
    gradient = made(sum(rows), HEADS, DIM)
    scale = DIM**-0.5
    ways = {
        "flash": lambda: torch.ops.aten._flash_attention_forward(
            *leaves, borders, key_borders, longest, longest, 0.0, False, False,
            scale=scale, window_size_left=reach, window_size_right=reach,
        )[0],
        "ours": lambda: text_attention(*leaves, borders, key_borders, longest, scale, reach),
    }  # fmt: skip
    chosen = is_faster(query, key, borders, longest, (reach, reach), 0.0)
    row = {"texts": len(rows), "rows": sum(rows), "keys": sum(keys), "longest": longest, "chosen": chosen}
    for name, forward in ways.items():
        states = forward()
        backward = partial(torch.autograd.grad, states, leaves, gradient, retain_graph=True)
        row[name] = {"forward": time_calls([forward], device), "backward": time_calls([backward], device)}
    return row


def markdown(rows: dict[str, dict]) -> str:
    lines = []
    for name, row in rows.items():
        times = {way: [row[way][part]["ms"] for part in ("forward", "backward")] for way in ("flash", "ours")}
        texts, _, reach = name.replace("1024", "1,024").replace("1280", "1,280").rpartition(", window ")
        window = "none" if reach == "-1" else f"{reach} each side"
        cells = [f"{forward:.2f} + {backward:.2f} ms" for forward, backward in times.values()]
        ratio = f"{sum(times['flash']) / sum(times['ours']):.2f}x" + ("" if row["chosen"] else ", not chosen")
        lines.append([texts, window, *cells, ratio])
    return table(["texts", "window", "FlashAttention", "this package", ""], lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=RESULTS / "attention.json")
    parser.add_argument("--render-only", action="store_true")
    options = parser.parse_args()
    if options.render_only:
        print(markdown(json.loads(options.output.read_text())["rows"]))
        return
    if not torch.cuda.is_available():
        raise SystemExit("This measures a CUDA GPU, and there is none.")
    rows = {}
    for name, lengths in shapes().items():
        for reach in WINDOWS:
            rows[f"{name}, window {reach}"] = measure(*lengths, reach)
    write(options.output, {"environment": environment(), "rows": rows})
    print(markdown(rows))


if __name__ == "__main__":
    main()
