"""The largest batch that each path can train: which sizes to try, and one try in a new process."""

from __future__ import annotations

from benchmarks.training.cell_processes import measure

SMALLEST, LARGEST = 32, 2**20
# Powers of two and the sizes midway between them.
GRID = sorted({size for power in range(5, 21) for size in (2**power, 3 * 2 ** (power - 1)) if size <= LARGEST})
# GradCache's mini-batch, and how many rows of its batch differ, as in gradcache_step.json.
MINI_BATCH = 128
TILE = 512

# Share of the device's memory to aim at, since the line through two peaks is not exact.
_SAFE = 0.95


def next_batch(tried: dict[int, dict], first: int, capacity_gib: float | None, largest: int = LARGEST) -> int | None:
    """The batch size to try next, from the results so far by size; ``None`` once the ceiling is known or ``largest`` fits.

    It lies between the largest size that fits and the smallest that does not: where a line through the two largest
    peaks reaches the memory of the device, or in the middle.
    """
    went = sorted(size for size, result in tried.items() if result["status"] == "ok")
    stopped = sorted(size for size, result in tried.items() if result["status"] != "ok")
    below = GRID.index(went[-1]) if went else -1
    above = GRID.index(stopped[0]) if stopped else sum(size <= largest for size in GRID)
    if above - below <= 1:
        return None
    if not tried:
        return first
    if not went:
        return GRID[above // 2]
    fitting = _fitting({size: tried[size].get("peak_gib") for size in went}, capacity_gib)
    if fitting is not None:
        guess = max((index for index, size in enumerate(GRID) if size <= fitting), default=0)
    elif stopped:
        guess = (below + above) // 2
    else:
        guess = below + 2
    return GRID[min(max(guess, below + 1), above - 1)]


def _fitting(peaks: dict[int, float | None], capacity_gib: float | None) -> float | None:
    """The batch size at which a line through the two largest peaks reaches the memory of the device."""
    known = [(size, peak) for size, peak in sorted(peaks.items()) if peak is not None][-2:]
    if capacity_gib is None or len(known) < 2 or known[1][1] <= known[0][1]:
        return None
    (size, peak), (larger, higher) = known
    return larger + (_SAFE * capacity_gib - higher) * (larger - size) / (higher - peak)


def try_batch(
    loss: str, path: str, compiled: bool, batch: int, layers: int | None, chunks: int | None, timeout: float
) -> dict:
    """One training step on a batch, after one on a few of its rows that creates the state of AdamW.

    With ``chunks`` the step ends after scoring that many chunks of queries.
    """
    extra = ["--loss", loss, "--mini-batch", str(MINI_BATCH), "--tile", str(TILE)]
    extra += ["--batches", "1", "--warmup", "1", "--warmup-rows", str(SMALLEST), "--steps", "1"]
    extra += ["--layers", str(layers)] if layers is not None else []
    extra += ["--chunks", str(chunks)] if chunks is not None else []
    cell = {"path": path, "batch": batch, "compile": compiled, "checkpointing": False}
    [(_, result)] = measure([cell], extra, timeout)
    return result


def ceiling(tried: dict[int, dict]) -> tuple[int | None, dict | None]:
    """The largest size that fits, and the result of the smallest that does not."""
    went = [size for size, result in tried.items() if result["status"] == "ok"]
    stopped = [size for size, result in tried.items() if result["status"] != "ok"]
    return max(went, default=None), tried[min(stopped)] if stopped else None
