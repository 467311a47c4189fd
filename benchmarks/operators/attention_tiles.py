"""Times of tiles of the attention kernels on this GPU, by head size, dropout and length of text.

python -m benchmarks attention_tiles
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple

import torch

from benchmarks.harness.tables import table
from benchmarks.harness.timing import time_calls
from benchmarks.harness.workers import failure
from pylate_fastmaxsim.kernels.attention import launch
from pylate_fastmaxsim.kernels.attention.launch import Tile, Tiles

TIMEOUT = 600
# Heads of each size, as in MiniLM (384 numbers) and in encoders of 768.
HEADS = {32: 12, 64: 12, 96: 8, 128: 6}
DROPOUTS = (0.0, 0.1)
TOKENS = 40960
SHORT = {
    "forward": (Tile(32, 2), Tile(64, 4), Tile(128, 8), Tile(128, 4)),
    "backward": (Tile(32, 2), Tile(32, 4), Tile(64, 4), Tile(64, 4, 168), Tile(64, 8), Tile(128, 8)),
}
LONG = {
    "forward": (Tile(64, 4), Tile(64, 4, 128), Tile(64, 8)),
    "backward": (Tile(32, 4), Tile(64, 4), Tile(64, 8)),
}
# Texts all of one length, which one tile holds, or of which the last is divided.
LENGTHS = (32, 64, 128, 192)


class Trial(NamedTuple):
    dim: int
    dropout: float
    part: str
    length: int
    tile: Tile
    divided: bool
    """Whether texts are divided into such tiles."""

    @property
    def tiles(self) -> Tiles:
        return Tiles((), self.tile) if self.divided else Tiles((self.tile,), self.tile)


def trials(dim: int, dropout: float) -> list[Trial]:
    """What is timed: tiles that hold the texts and are up to twice as long, and for 128 tokens and more also divided texts."""
    found = []
    for part, length in itertools.product(SHORT, LENGTHS):
        fitting = [tile for tile in SHORT[part] if length <= tile.block <= 2 * length]
        found += [Trial(dim, dropout, part, length, tile, False) for tile in fitting]
        if length >= 128:
            found += [Trial(dim, dropout, part, length, tile, True) for tile in LONG[part]]
    return found


def prepared(dim: int, length: int, tokens: int, dropout: float) -> dict[str, Callable]:
    """Forward and backward of `tokens` tokens in texts of one length, as functions of tiles."""
    torch.manual_seed(0)
    count = max(1, tokens // length)
    query, key, value, grad = torch.randn(4, count * length, HEADS[dim], dim, device="cuda", dtype=torch.bfloat16)
    borders = torch.arange(count + 1, device="cuda", dtype=torch.int32) * length
    options = {"seed": torch.tensor([1], device="cuda") if dropout else None, "dropout": dropout}
    vectors, rest = (query, key, value), (borders, borders, length, dim**-0.5, -1)
    saved = launch.forward(*vectors, *rest, **options, tiles=Tiles((), Tile(32, 4)))
    return {
        "forward": lambda tiles: launch.forward(*vectors, *rest, **options, tiles=tiles),
        "backward": lambda tiles: launch.backward(grad, *vectors, *saved, *rest, **options, tiles=tiles),
    }


def compile_trials(dim: int, dropout: float, part: str) -> None:
    """Launch every tile once on a few tokens, so that Triton's cache holds its kernel."""
    for trial in trials(dim, dropout):
        if trial.part != part:
            continue
        try:
            prepared(dim, trial.length, 1, dropout)[trial.part](trial.tiles)
        except Exception:  # noqa: BLE001, S112 - it fails again, and is noted, where it is timed
            continue


def cells(options: argparse.Namespace) -> dict[str, dict]:
    made = {}
    for dim, dropout, length in itertools.product(HEADS, DROPOUTS, LENGTHS):
        name = f"heads of {dim}, dropout {dropout}, texts of {length}"
        made[name] = {"dim": dim, "dropout": dropout, "length": length}
    return made


def recorded(*_) -> dict:
    """Compile everything beforehand, in several processes."""
    cases = list(itertools.product(HEADS, DROPOUTS, SHORT))
    with ProcessPoolExecutor(len(cases), mp_context=multiprocessing.get_context("spawn")) as workers:
        list(workers.map(compile_trials, *zip(*cases, strict=True)))
    return {}


def measure(cell: dict) -> dict:
    """The fastest tile of forward and backward."""
    device = torch.device("cuda")
    functions = prepared(cell["dim"], cell["length"], TOKENS, cell["dropout"])
    found: dict = {}
    for trial in trials(cell["dim"], cell["dropout"]):
        if trial.length != cell["length"]:
            continue
        record = {"tile": trial.tile, "divided": trial.divided}
        try:
            run = functions[trial.part]
            record["ms"] = time_calls([lambda run=run, tiles=trial.tiles: run(tiles)], device)["ms"]
        except Exception as problem:  # noqa: BLE001 - tiles that do not fit
            record["failure"] = failure(problem)
        found.setdefault(trial.part, []).append(record)
    return found


def markdown(content: dict) -> str:
    lines = []
    for name, cell in content["cells"].items():
        for part in SHORT:
            best = min((each for each in cell[part] if "ms" in each), key=lambda each: each["ms"])
            divided = ", divided" * best["divided"]
            lines.append([name, part, f"{tuple(best['tile'])}{divided}", f"{best['ms']:.4f} ms"])
    return table(["", "", "fastest tile", ""], lines)
