"""Exact search of a corpus on disk by format: streamed from its memory map, rescored from bf16, and by PyLate's scoring.

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
from collections.abc import Generator, Iterable, Iterator
from functools import partial
from pathlib import Path

import torch
from pylate.scores import colbert_scores
from torch import Tensor
from torch.nn.functional import normalize

from benchmarks.harness.lengths import SIGMA
from benchmarks.harness.tables import table, times
from benchmarks.harness.timing import DEVICE, seconds_of
from pylate_fastmaxsim import ResidualCodec, TokenBatch
from pylate_fastmaxsim.retrieval.corpus import TOKENS_PER_BATCH, Corpus, write_corpus
from pylate_fastmaxsim.retrieval.search import search

Found = tuple[Tensor, Tensor]

LONGEST = 300  # tokens of a passage
QUERY_LENGTH = 32
REPEATS = 3  # of a search
# Stock holds the similarities twice, plain and masked, and their maxima.
SHARE_OF_MEMORY = 0.35
CPU_CHUNK = 64  # passages

BITS = {"residual-4": 4, "residual-2": 2}
FORMATS = ["bf16", "int8", "fp8", *BITS]
TITLES = {
    "streamed": "from the memory map",
    "rescored": "from the memory map, rescored from bf16",
}


def passages(options: argparse.Namespace) -> Iterator[TokenBatch]:
    """The corpus, generated on the device in batches."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    logarithms = torch.randn(options.passages, generator=torch.Generator().manual_seed(0)) * SIGMA
    lengths = (logarithms - SIGMA**2 / 2).exp().mul(options.mean).round().clamp(1, LONGEST).long()
    for part in lengths.split(max(1, TOKENS_PER_BATCH // options.mean)):
        bounds = torch.cat([part.new_zeros(1), part.cumsum(0)])
        values = torch.randn(int(bounds[-1]), options.dim, generator=generator, device=DEVICE)
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
    queries = queries.to(dtype)

    def found(passages: int) -> Found:
        chunks = corpus.batches(DEVICE, size * options.mean, end=passages)
        return stock_search(queries, chunks, options.k, dtype)

    size = CPU_CHUNK
    if DEVICE.type == "cuda":
        free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        size = max(1, int(SHARE_OF_MEMORY * free) // (queries[..., 0].numel() * LONGEST * dtype.itemsize))
    while True:
        try:
            found(min(count, 2 * size))  # which also warms up
            break
        except torch.OutOfMemoryError:
            size //= 2
        torch.cuda.empty_cache()
    result, best = seconds_of(lambda: found(count))
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
    cells = content["cells"]
    setting = next(iter(cells.values()))["environment"]["setting"]
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


def written(name: str, options: argparse.Namespace) -> Generator[tuple[str, dict], None, Corpus]:
    """The corpus of a format, from the disk if it is there."""
    folder, began, seconds = options.folder / name, time.perf_counter(), None
    if (folder / "corpus.json").exists():
        corpus = Corpus(folder)
    else:
        format = None if name == "bf16" else name
        if name in BITS:
            sample = next(passages(options)).values
            format = ResidualCodec.train(sample, BITS[name], options.centroids)
        corpus = write_corpus(folder, passages(options), format=format)
        seconds = time.perf_counter() - began
    if (len(corpus), corpus.dim) != (options.passages, options.dim):
        raise SystemExit(f"{folder} holds another corpus; choose another --folder.")
    yield f"{name}/write", {"seconds": seconds, "tokens": corpus.tokens, "bytes": corpus.nbytes}
    return corpus


def searched(
    name: str, corpora: dict[str, Corpus], queries: TokenBatch, k: int, expected: Found | None
) -> Generator[tuple[str, dict], None, Found]:
    """Search a corpus in each way; ``expected`` are the results of bf16."""
    corpus = corpora[name]
    batches = partial(corpus.batches, DEVICE)

    def compared(found: Found) -> dict:
        return {} if expected is None else {"difference": difference(found, expected)}

    search(queries, [next(iter(batches()))], k)  # warm-up
    result, found = seconds_of(lambda: search(queries, batches(), k), REPEATS)
    yield f"{name}/streamed", {**result, **compared(found)}

    if expected is not None:
        result, again = seconds_of(lambda: search(queries, batches(), k, rescore=corpora["bf16"]))
        late = again.from_last_tenth.double().mean().item()
        yield f"{name}/rescored", {**result, **compared(again), "mean_from_last_tenth": late}
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()
    return found


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--folder", type=Path, help="of the corpora")
    parser.add_argument("--centroids", type=int, default=1 << 15, help="of residual codes")
    parser.add_argument("--passages", type=int, default=1_000_000)
    parser.add_argument("--mean", type=int, default=80, help="tokens of a passage")
    parser.add_argument("--queries", type=int, default=1000)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--k", type=int, default=100)
    parser.add_argument("--stock-passages", type=int, default=100_000, help="passages that PyLate scores")
    parser.add_argument("--check-passages", type=int, default=10_000, help="passages that PyLate scores in float32")


def cells(options: argparse.Namespace) -> dict[str, dict]:
    """Names of the stages; a run makes them all."""
    if options.folder is None:
        raise SystemExit("--folder must name the folder of the corpora.")
    stages = {
        f"{name}/{stage}": {}
        for name in FORMATS
        for stage in ("write", *TITLES)
        if name != "bf16" or stage != "rescored"
    }
    return stages | {"stock": {}, "stock_float32": {}}


def recorded(_: str, options: argparse.Namespace) -> dict:
    keys = ("passages", "mean", "queries", "dim", "k", "centroids")
    return {"setting": {key: getattr(options, key) for key in keys}}


def run(_: str, cells: dict[str, dict], options: argparse.Namespace) -> Iterator[tuple[str, dict]]:
    if not cells:
        return
    corpora = {}
    for name in FORMATS:
        corpora[name] = yield from written(name, options)
    generator = torch.Generator(DEVICE).manual_seed(1)
    padded = torch.randn(options.queries, QUERY_LENGTH, options.dim, generator=generator, device=DEVICE)
    padded = normalize(padded, dim=-1).bfloat16()
    queries, expected = TokenBatch.from_padded(padded), None
    for name in FORMATS:
        found = yield from searched(name, corpora, queries, options.k, expected)
        expected = found if expected is None else expected
    # PyLate rounds similarities and scores to bfloat16; its float32 scores are those of this package.
    for stage, count, dtype in (
        ("stock", options.stock_passages, torch.bfloat16),
        ("stock_float32", options.check_passages, torch.float32),
    ):
        part = min(options.passages, count)
        result, found = stock(padded, corpora["bf16"], part, options, dtype)
        ours = search(queries, corpora["bf16"].batches(DEVICE, end=part), options.k)
        yield stage, {**result, "difference": difference(ours, found)}
