"""Exact search of a corpus on disk: streamed from its memory map, resident on the GPU, and by PyLate's own scoring.

    python -m benchmarks.retrieval.corpus_search --folder /data/corpus
    python -m benchmarks.retrieval.corpus_search --folder /tmp/corpus --passages 500 --queries 4 --dim 16 --output /tmp/a.json
    python -m benchmarks.retrieval.corpus_search --render-only      # table and plot from the committed results

Passages are random unit vectors, log-normal in length and truncated at 300 tokens; a million take about 20 GB of disk.
They are written once to ``--folder`` and used again. PyLate scores the first ``--stock-passages`` of them, in chunks
that are padded to their longest passage; its time for the whole corpus is extrapolated. Results are written after each
stage.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pylate.scores import colbert_scores
from torch import Tensor
from torch.nn.functional import normalize

from benchmarks.harness.lengths import SIGMA
from benchmarks.harness.paths import RESULTS
from benchmarks.harness.plots import COLOURS, bars
from benchmarks.harness.records import environment, write
from benchmarks.harness.tables import table
from pylate_fastmaxsim import TokenBatch
from pylate_fastmaxsim.retrieval.corpus import TOKENS_PER_BATCH, Corpus, write_corpus
from pylate_fastmaxsim.retrieval.search import search

LONGEST = 300  # tokens of a passage
# Stock holds the similarities twice, plain and masked, and their maxima.
SHARE_OF_MEMORY = 0.35
CPU_CHUNK = 64  # passages

TITLES = {
    "streamed": "this package, from the memory map",
    "resident": "this package, corpus on the device",
    "stock": "PyLate",
}


def passages(options: argparse.Namespace, device: torch.device) -> Iterator[TokenBatch]:
    """The corpus, generated on the device in batches."""
    generator = torch.Generator(device).manual_seed(0)
    logarithms = torch.randn(options.passages, generator=torch.Generator().manual_seed(0)) * SIGMA
    lengths = (logarithms - SIGMA**2 / 2).exp().mul(options.mean).round().clamp(1, LONGEST).long()
    for part in lengths.split(max(1, TOKENS_PER_BATCH // options.mean)):
        bounds = torch.cat([part.new_zeros(1), part.cumsum(0)])
        values = torch.randn(int(bounds[-1]), options.dim, generator=generator, device=device)
        yield TokenBatch.from_packed(normalize(values, dim=-1).bfloat16(), bounds, max_length=LONGEST)


def timed(call: Callable[[], Any], device: torch.device, repeats: int = 1) -> tuple[dict, Any]:
    """Seconds, and peak memory beyond what was allocated before, of a call; and what it returned last."""
    on_gpu = device.type == "cuda"
    before = 0
    if on_gpu:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    each = []
    for _ in range(repeats):
        began = time.perf_counter()
        result = call()
        if on_gpu:
            torch.cuda.synchronize()
        each.append(time.perf_counter() - began)
    peak = torch.cuda.max_memory_allocated() - before if on_gpu else None
    return {"seconds": statistics.median(each), "each_seconds": each, "peak_bytes": peak}, result


@torch.no_grad()
def stock_search(queries: Tensor, chunks: Iterable[TokenBatch], k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The top ``k`` over padded chunks, scored by PyLate."""
    best = positions = None
    first = 0
    for chunk in chunks:
        values, mask = chunk.to_padded()
        scores = colbert_scores(queries, values.to(dtype), documents_mask=mask.to(dtype), backend="torch")
        del values, mask
        found, order = scores.topk(min(k, len(chunk)))
        order = order + first
        if best is not None:
            found, order = torch.cat([best, found], dim=1), torch.cat([positions, order], dim=1)
        best, places = found.topk(min(k, found.shape[1]))
        positions = order.gather(1, places)
        first += len(chunk)
    return best, positions


def chunk_size(queries: Tensor, dtype: torch.dtype) -> int:
    """How many passages fit with their similarities to all queries."""
    if queries.device.type != "cuda":
        return CPU_CHUNK
    free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    tokens = queries.shape[0] * queries.shape[1] * LONGEST
    return max(1, int(SHARE_OF_MEMORY * free) // (tokens * dtype.itemsize))


def stock(
    queries: Tensor, corpus: Corpus, count: int, k: int, dtype: torch.dtype, mean: int
) -> tuple[dict, tuple[Tensor, Tensor]]:
    """Time and result of stock for the first ``count`` passages, in the largest chunks that fit."""
    queries = queries.to(dtype)

    def found(passages: int, size: int) -> tuple[Tensor, Tensor]:
        return stock_search(queries, corpus.batches(queries.device, size * mean, end=passages), k, dtype)

    size = chunk_size(queries, dtype)
    while not fits(partial(found, min(count, 2 * size), size)):  # which also warms up
        size //= 2
    result, best = timed(partial(found, count, size), queries.device)
    return {**result, "passages": count, "passages_per_chunk": size, "dtype": str(dtype).removeprefix("torch.")}, best


def fits(call: Callable[[], object]) -> bool:
    """Whether a call fits in the memory of the device."""
    try:
        call()
        return True
    except torch.OutOfMemoryError:
        pass
    torch.cuda.empty_cache()
    return False


def difference(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> dict:
    """How far two results differ, in scores rank by rank and in passages."""
    (scores, positions), (other, others) = found, expected
    shared = (positions[:, :, None] == others[:, None, :]).any(2)
    return {
        "largest_score_difference": (scores.double() - other.double()).abs().max().item(),
        "largest_score": other.abs().max().item(),
        "share_of_same_passages": shared.double().mean().item(),
        "share_of_same_ranks": (positions == others).double().mean().item(),
    }


def seconds_of_paths(content: dict) -> dict[str, float]:
    """Seconds of each path for the whole corpus."""
    count, stages = content["setting"]["passages"], content["stages"]
    return {name: stages[name]["seconds"] * count / stages[name]["passages"] for name in TITLES if name in stages}


def markdown(content: dict) -> str:
    """A table of the paths, for the whole corpus."""
    count, paths = content["setting"]["passages"], content["stages"]
    seconds = seconds_of_paths(content)
    rows = []
    for name, value in seconds.items():
        peak = paths[name]["peak_bytes"]
        memory = "" if peak is None else f"{peak / 2**30:.1f} GiB"
        ratio = f"{seconds['stock'] / value:.1f}x" if "stock" in seconds else ""
        rows.append([TITLES[name], f"{value:.2f} s", ratio, memory])
    lines = [table(["path", "time", "relative to PyLate", "device memory beyond what was held before"], rows)]
    if "stock" in paths and paths["stock"]["passages"] < count:
        part = paths["stock"]
        lines.append(
            f"\nPyLate's time is that of {part['passages']:,} of the {count:,} passages, {part['seconds']:.2f} s, times "
            f"{count / part['passages']:g}."
        )
    return "\n".join(lines)


def draw_paths(content: dict, target: Path) -> None:
    """The same as a bar plot."""
    setting, seconds = content["setting"], seconds_of_paths(content)
    peaks = [content["stages"][name]["peak_bytes"] for name in seconds]
    measures = {
        "time for the whole corpus (s)": (list(seconds.values()), [f"{value:.2f}" for value in seconds.values()]),
        "device memory (GiB)": (
            [peak and peak / 2**30 for peak in peaks],
            ["no device" if peak is None else f"{peak / 2**30:.1f}" for peak in peaks],
        ),
    }
    rows = [(TITLES[name], COLOURS[0 if name == "stock" else -1]) for name in seconds]
    figure = bars(rows, measures, f"{setting['queries']:,} queries against {setting['passages']:,} passages")
    figure.savefig(target, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="of the corpus")
    parser.add_argument("--passages", type=int, default=1_000_000)
    parser.add_argument("--mean", type=int, default=80, help="tokens of a passage")
    parser.add_argument("--queries", type=int, default=1000)
    parser.add_argument("--query-length", type=int, default=32)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--k", type=int, default=100)
    parser.add_argument("--stock-passages", type=int, default=100_000, help="passages that PyLate scores")
    parser.add_argument("--check-passages", type=int, default=10_000, help="passages that PyLate scores in float32")
    parser.add_argument("--tokens-per-batch", type=int, default=TOKENS_PER_BATCH)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, default=RESULTS / "corpus_search.json")
    parser.add_argument("--render-only", action="store_true", help="only table and plot of the results file")
    options = parser.parse_args()
    if options.render_only:
        content = json.loads(options.output.read_text())
        draw_paths(content, options.output.with_suffix(".png"))
        print(markdown(content))
        return
    if options.folder is None:
        parser.error("--folder must name the folder of the corpus.")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    setting = {name: value for name, value in vars(options).items() if name not in ("folder", "output", "render_only")}
    content: dict = {"environment": environment(), "setting": {**setting, "dtype": "bfloat16"}, "stages": {}}

    def finished(stage: str, result: dict) -> None:
        content["stages"][stage] = result
        print(stage, json.dumps(result), flush=True)
        write(options.output, content)

    began = time.perf_counter()
    written = not (options.folder / "corpus.json").exists()
    corpus = write_corpus(options.folder, passages(options, device)) if written else Corpus(options.folder)
    if (len(corpus), corpus.dim) != (options.passages, options.dim):
        raise SystemExit(f"{options.folder} holds another corpus; choose another --folder.")
    size = corpus.tokens * corpus.dim * corpus.dtype.itemsize
    seconds = time.perf_counter() - began if written else None
    finished("write", {"seconds": seconds, "tokens": corpus.tokens, "bytes": size})

    generator = torch.Generator(device).manual_seed(1)
    shape = (options.queries, options.query_length, options.dim)
    padded = normalize(torch.randn(shape, generator=generator, device=device), dim=-1).bfloat16()
    queries = TokenBatch.from_padded(padded)
    count, k = options.passages, options.k

    def streamed(end: int | None = None) -> tuple[Tensor, Tensor]:
        return search(queries, corpus.batches(device, options.tokens_per_batch, end=end), k)

    search(queries, [next(corpus.batches(device, options.tokens_per_batch))], k)  # warm-up
    if device.type == "cuda":  # on a CPU nothing is read before it is scored
        result, _ = timed(lambda: sum(map(len, corpus.batches(device, options.tokens_per_batch))), device)
        finished("read", {**result, "gigabytes_per_second": size / result["seconds"] / 1e9})
    result, found = timed(streamed, device, options.repeats)
    finished("streamed", {**result, "passages": count})

    batches = list(corpus.batches(device, options.tokens_per_batch))
    result, again = timed(lambda: search(queries, batches, k), device, options.repeats)
    same = all(torch.equal(ours, theirs) for ours, theirs in zip(found, again, strict=True))
    finished("resident", {**result, "passages": count, "same_as_streamed": same})
    batches.clear()
    if device.type == "cuda":
        torch.cuda.empty_cache()

    # Stock rounds similarities and scores to bfloat16; its float32 scores are those of this package.
    part = min(count, options.stock_passages)
    result, found = stock(padded, corpus, part, k, torch.bfloat16, options.mean)
    finished("stock", {**result, "difference": difference(streamed(part), found)})
    part = min(count, options.check_passages)
    result, found = stock(padded, corpus, part, k, torch.float32, options.mean)
    finished("stock_float32", {**result, "difference": difference(streamed(part), found)})
    draw_paths(content, options.output.with_suffix(".png"))
    print(markdown(content))


if __name__ == "__main__":
    main()
