"""Times of tiles of the attention kernels on this GPU, by head size, dropout and length of text."""

from __future__ import annotations

import itertools
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.harness.records import environment, write
from benchmarks.harness.timing import time_calls
from benchmarks.harness.workers import failure
from pylate_fastmaxsim.kernels.attention import launch
from pylate_fastmaxsim.kernels.attention.launch import Tile, Tiles

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


def fastest(timed: list[dict]) -> dict[str, dict]:
    """The fastest tile of each head size, dropout, part and length, by the names of these."""
    best = {}
    for trial in sorted((trial for trial in timed if "ms" in trial), key=lambda trial: trial["ms"]):
        name = f"{trial['part']}, heads of {trial['dim']}, dropout {trial['dropout']}, texts of {trial['length']}"
        best.setdefault(name, trial)
    return dict(sorted(best.items()))


def sweep(output: Path) -> None:
    device = torch.device("cuda")
    cases = list(itertools.product(HEADS, DROPOUTS, SHORT))
    with ProcessPoolExecutor(len(cases), mp_context=multiprocessing.get_context("spawn")) as workers:
        list(workers.map(compile_trials, *zip(*cases, strict=True)))
    timed = []
    for dim, dropout in itertools.product(HEADS, DROPOUTS):
        for length in LENGTHS:
            functions = prepared(dim, length, TOKENS, dropout)
            for trial in trials(dim, dropout):
                if trial.length != length:
                    continue
                record = trial._asdict()
                try:
                    run = functions[trial.part]
                    record["ms"] = time_calls([lambda run=run, tiles=trial.tiles: run(tiles)], device)["ms"]
                except Exception as problem:  # noqa: BLE001 - tiles that do not fit
                    record["failure"] = failure(problem)
                timed.append(record)
    best = fastest(timed)
    write(output, {"environment": environment(), "fastest": best, "trials": timed})
    for name, trial in best.items():
        print(f"{trial['ms']:.4f} ms  {name}: {tuple(trial['tile'])}{', divided' if trial['divided'] else ''}")
