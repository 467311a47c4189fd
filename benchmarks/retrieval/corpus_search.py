"""Exact search of a corpus on disk by format: streamed from its memory map, resident on the GPU, rescored from bf16, and
by PyLate's own scoring.

    python -m benchmarks corpus_search --folder /data/corpora
    python -m benchmarks corpus_search --folder /tmp/corpora --passages 500 --queries 4 --dim 16 --centroids 32 --results /tmp/a.json

Passages are random unit vectors, log-normal in length and truncated at 300 tokens; a million take about 20 GB of disk as
bf16, 10 as int8 and as fp8, 6 and 4 as residual codes of 4 and 2 bits. Each format is written once, to a folder in
``--folder``, and used again. All are written before any is searched, so that those that fit are in the page cache. The
codecs are trained on the first batch of passages. Random vectors have no neighbours, so that what compression changes in
the results is more than for embeddings of texts.

PyLate scores the first ``--stock-passages`` of them, in chunks that are padded to their longest passage; its time for
the whole corpus is extrapolated. Results are written after each stage.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from pylate.scores import colbert_scores
from torch import Tensor
from torch.nn.functional import normalize

from benchmarks.harness.lengths import SIGMA
from benchmarks.harness.tables import table, times
from benchmarks.harness.timing import seconds_of
from pylate_fastmaxsim import CompressedBatch, ResidualCodec, TokenBatch
from pylate_fastmaxsim.retrieval.corpus import TOKENS_PER_BATCH, Corpus, write_corpus
from pylate_fastmaxsim.retrieval.search import search

Batch = TokenBatch | CompressedBatch
Found = tuple[Tensor, Tensor]

LONGEST = 300  # tokens of a passage
# Stock holds the similarities twice, plain and masked, and their maxima.
SHARE_OF_MEMORY = 0.35
CPU_CHUNK = 64  # passages

BITS = {"residual-4": 4, "residual-2": 2}
FORMATS = ["bf16", "int8", "fp8", *BITS]
TITLES = {
    "streamed": "from the memory map",
    "resident": "corpus on the device",
    "rescored": "from the memory map, rescored from bf16",
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


@torch.no_grad()
def stock_search(queries: Tensor, chunks: Iterable[TokenBatch], k: int, dtype: torch.dtype) -> Found:
    """The top ``k`` over padded chunks, scored by PyLate."""
    parts, first = [], 0
    for chunk in chunks:
        values, mask = chunk.to_padded()
        scores = colbert_scores(queries, values.to(dtype), documents_mask=mask.to(dtype), backend="torch")
        del values, mask
        found, order = scores.topk(min(k, len(chunk)))
        parts = [*parts, (found, order + first)]
        found, order = (torch.cat(each, dim=1) for each in zip(*parts, strict=True))
        best, places = found.topk(min(k, found.shape[1]))
        parts, first = [(best, order.gather(1, places))], first + len(chunk)
    return parts[0]


def stock(
    queries: Tensor, corpus: Corpus, count: int, options: argparse.Namespace, dtype: torch.dtype
) -> tuple[dict, Found]:
    """Time and result of stock for the first ``count`` passages, in the largest chunks that fit."""
    queries, cuda = queries.to(dtype), queries.device.type == "cuda"

    def found(passages: int) -> Found:
        chunks = corpus.batches(queries.device, size * options.mean, end=passages)
        return stock_search(queries, chunks, options.k, dtype)

    size = CPU_CHUNK
    if cuda:
        free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        size = max(1, int(SHARE_OF_MEMORY * free) // (queries[..., 0].numel() * LONGEST * dtype.itemsize))
    while True:
        try:
            found(min(count, 2 * size))  # which also warms up
            break
        except torch.OutOfMemoryError:
            size //= 2
        torch.cuda.empty_cache()
    result, best = seconds_of(lambda: found(count), queries.device)
    return {**result, "passages": count, "passages_per_chunk": size, "dtype": str(dtype).removeprefix("torch.")}, best


def difference(found: Found, expected: Found) -> dict:
    """How far two results differ, in scores rank by rank and in passages."""
    (scores, positions), (other, others) = found, expected
    shared = (positions[:, :, None] == others[:, None, :]).any(2)
    return {
        "largest_score_difference": (scores.double() - other.double()).abs().max().item(),
        "largest_score": other.abs().max().item(),
        "share_of_same_passages": shared.double().mean().item(),
        "share_of_same_ranks": (positions == others).double().mean().item(),
    }


def markdown(content: dict) -> str:
    """A table of the ways to search, for the whole corpus, PyLate last."""
    cells, setting = content["cells"], setting_of(content)
    stock = cells.get("stock")
    share = setting["passages"] / stock["passages"] if stock else 1
    whole = stock and stock["seconds"] * share
    lines = []

    def add(title: str, cell: dict, seconds: float, disk_bytes: int | None = None) -> None:
        peak, same = cell["peak_bytes"], cell.get("difference", {}).get("share_of_same_passages")
        entries = [f"{seconds:.2f} s", times(whole, seconds), "" if peak is None else f"{peak / 2**30:.1f} GiB"]
        entries.append("" if disk_bytes is None else f"{disk_bytes / 1e9:.1f} GB")
        lines.append([title, *entries, "" if same is None or cell is stock else f"{same:.1%}"])

    for name, (path, title) in itertools.product(FORMATS, TITLES.items()):
        if (cell := cells.get(f"{name}/{path}")) is not None:
            add(f"{name}, {title}", cell, cell["seconds"], cells[f"{name}/write"]["bytes"])
    if stock:
        add("PyLate", stock, whole)
    header = ["path", "time", "relative to PyLate", "device memory beyond what was held before", "on disk"]
    text = table([*header, f"of bf16's best {setting['k']}"], lines)
    if share > 1:
        text += (
            f"\n\nPyLate's time is that of {stock['passages']:,} of the {setting['passages']:,} passages, "
            f"{stock['seconds']:.2f} s, times {share:g}."
        )
    return text


def setting_of(content: dict) -> dict:
    return next(iter(content["cells"].values()))["environment"]["setting"]


@dataclass
class Benchmark:
    """All stages on one device, and their figures by ``format/stage``."""

    options: argparse.Namespace
    device: torch.device
    found: dict[str, dict] = field(default_factory=dict)

    def finished(self, result: dict, stage: str, format: str | None = None) -> None:
        self.found[stage if format is None else f"{format}/{stage}"] = result

    def written(self, name: str) -> Corpus:
        """The corpus of a format, from the disk if it is there."""
        options, folder = self.options, self.options.folder / name
        began, seconds = time.perf_counter(), None
        if (folder / "corpus.json").exists():
            corpus = Corpus(folder)
        else:
            format = None if name == "bf16" else name
            if name in BITS:
                sample = next(passages(options, self.device)).values
                format = ResidualCodec.train(sample, BITS[name], options.centroids)
                self.finished({"seconds": time.perf_counter() - began, "vectors": len(sample)}, "train", name)
                began = time.perf_counter()
            corpus = write_corpus(folder, passages(options, self.device), format=format)
            seconds = time.perf_counter() - began
        if (len(corpus), corpus.dim) != (options.passages, options.dim):
            raise SystemExit(f"{folder} holds another corpus; choose another --folder.")
        self.finished({"seconds": seconds, "tokens": corpus.tokens, "bytes": corpus.nbytes}, "write", name)
        return corpus

    def searched(self, name: str, corpora: dict[str, Corpus], queries: TokenBatch, expected: Found | None) -> Found:
        """Search a corpus in each way; ``expected`` are the results of bf16."""
        options, device, corpus = self.options, self.device, corpora[name]

        def batches() -> Iterator[Batch]:
            return corpus.batches(device, options.tokens_per_batch)

        def compared(found: Found) -> dict:
            return {} if expected is None else {"difference": difference(found, expected)}

        search(queries, [next(batches())], options.k)  # warm-up
        if device.type == "cuda":  # on a CPU nothing is read before it is scored
            result, _ = seconds_of(lambda: sum(map(len, batches())), device)
            self.finished({**result, "gigabytes_per_second": corpus.nbytes / result["seconds"] / 1e9}, "read", name)
        result, found = seconds_of(lambda: search(queries, batches(), options.k), device, options.repeats)
        self.finished({**result, **compared(found)}, "streamed", name)

        resident = list(batches())
        result, again = seconds_of(lambda: search(queries, resident, options.k), device, options.repeats)
        same = all(torch.equal(ours, theirs) for ours, theirs in zip(found, again, strict=True))
        self.finished({**result, **compared(again), "same_as_streamed": same}, "resident", name)
        resident.clear()

        if expected is not None:
            result, again = seconds_of(lambda: search(queries, batches(), options.k, rescore=corpora["bf16"]), device)
            late = again.from_last_tenth.double().mean().item()
            self.finished({**result, **compared(again), "mean_from_last_tenth": late}, "rescored", name)
        if device.type == "cuda":
            torch.cuda.empty_cache()
        return found

    def stock(self, corpus: Corpus, padded: Tensor, queries: TokenBatch) -> None:
        """PyLate rounds similarities and scores to bfloat16; its float32 scores are those of this package."""
        options = self.options
        for stage, passages_, dtype in (
            ("stock", options.stock_passages, torch.bfloat16),
            ("stock_float32", options.check_passages, torch.float32),
        ):
            part = min(options.passages, passages_)
            result, found = stock(padded, corpus, part, options, dtype)
            ours = search(queries, corpus.batches(self.device, options.tokens_per_batch, end=part), options.k)
            self.finished({**result, "difference": difference(ours, found)}, stage)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--folder", type=Path, help="of the corpora")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=FORMATS)
    parser.add_argument("--centroids", type=int, default=1 << 15, help="of residual codes")
    parser.add_argument("--no-stock", action="store_true", help="leave PyLate out")
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


def cells(options: argparse.Namespace) -> dict[str, dict]:
    """Names of the stages; a run makes them all."""
    if options.folder is None or options.formats[0] != "bf16":
        raise SystemExit("--folder must name the folder of the corpora, and --formats must begin with bf16.")
    searched = (*["read"] * torch.cuda.is_available(), *TITLES)
    stages = {
        f"{name}/{stage}": {}
        for name in options.formats
        for stage in (*["train"] * (name in BITS), "write", *searched)
        if name != "bf16" or stage != "rescored"
    }
    return stages | ({} if options.no_stock else {"stock": {}, "stock_float32": {}})


def recorded(_: str, options: argparse.Namespace) -> dict:
    keys = ("passages", "mean", "queries", "query_length", "dim", "k", "centroids", "tokens_per_batch", "repeats")
    return {"setting": {key: getattr(options, key) for key in keys}}


def run(_: str, cells: dict[str, dict], options: argparse.Namespace) -> Iterator[tuple[str, dict]]:
    if not cells:
        return
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    benchmark = Benchmark(options, device)
    corpora = {name: benchmark.written(name) for name in options.formats}
    generator = torch.Generator(device).manual_seed(1)
    shape = (options.queries, options.query_length, options.dim)
    padded = normalize(torch.randn(shape, generator=generator, device=device), dim=-1).bfloat16()
    queries, expected = TokenBatch.from_padded(padded), None
    for name in options.formats:
        found = benchmark.searched(name, corpora, queries, expected)
        expected = found if expected is None else expected
        yield from _taken(benchmark.found)
    if not options.no_stock:
        benchmark.stock(corpora["bf16"], padded, queries)
        yield from _taken(benchmark.found)


def _taken(found: dict[str, dict]) -> Iterator[tuple[str, dict]]:
    while found:
        name = next(iter(found))
        yield name, found.pop(name)
