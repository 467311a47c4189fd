"""Exact search of sparse vectors on one GPU: SparseIndex, the published scatter-add kernel, and cuSPARSE on the same data.

    python -m benchmarks sparse_search                  # measure what is missing, then print the tables
    python -m benchmarks sparse_search --sizes 100 300 --sweep-size 300 --queries 4 --tiny --results /tmp/a.json   # on a CPU

A cell is a collection: of so many documents, with so many terms a document, or on a CPU. It has every engine with its
cases, each a number of queries and a k. A time is from the call, with the device idle, to the last kernel. The first
queries of each collection are compared with float64 in the order that SparseIndex promises. At ``--sweep-size`` documents
there are also batch sizes. What fails is recorded and the rest goes on.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Protocol

import torch

from benchmarks.harness.tables import machine, table, time_and_memory, times
from benchmarks.harness.timing import elapsed, mark, peak_bytes
from benchmarks.harness.workers import failure
from benchmarks.retrieval import sparse_data
from benchmarks.retrieval.sparse_baselines import CuSparse, Found, ScatterAdd
from pylate_fastmaxsim import SparseBatch, SparseIndex, reference
from pylate_fastmaxsim.kernels.sparse.postings import DOCUMENTS_PER_BLOCK
from pylate_fastmaxsim.retrieval.topk import merge_results

TIMEOUT = 300
ENGINES = {
    "index": "`SparseIndex`",
    "scatter": "scatter-add",
    "cusparse": "cuSPARSE",
}
# ms of 500 queries in the paper that published the scatter-add kernel.
PUBLISHED = {100_000: 7.3, 1_000_000: 393.0, 8_800_000: 635.0}
LINKS = "([numbers](../benchmarks/results/sparse_search.json), [plot](../benchmarks/results/sparse_search.png))"
CASES = {"k=10": "k = 10", "k=1000": "k = 1000", "one": "k = 1000, one query"}
K = 1000
BATCHES = (1, 4, 16, 64, 256, 1024)
TERMS = (10, 25, 50, 127, 250, 500)
CPU_DOCUMENTS = 100_000
CHECKED = 8  # queries that are compared with float64
REPEATS, MILLISECONDS = 20, 500  # a case is repeated until one of them is reached


class Engine(Protocol):
    @property
    def nbytes(self) -> int: ...

    def search(self, queries: SparseBatch, k: int) -> Found: ...


def build_index(collection: list[SparseBatch]) -> SparseIndex:
    return SparseIndex.build(collection, device=collection[0].device)


MAKERS: dict[str, Callable[[list[SparseBatch]], Engine]] = {
    "index": build_index,
    "scatter": ScatterAdd,
    "cusparse": CuSparse,
}


def posting_bytes(engine: Engine) -> int:
    """Bytes of what is scanned; an index on a GPU keeps the exact rows beside it."""
    on_gpu = isinstance(engine, SparseIndex) and engine.device.type == "cuda"
    return engine._blocks.searched.posting_bytes if on_gpu else engine.nbytes


def exact(queries: SparseBatch, collection: list[SparseBatch], k: int) -> Found:
    """The definition, chunk by chunk."""
    found, start = [], 0
    for chunk in collection:
        scores, positions = reference.sparse_top(queries, chunk, k)
        found.append((scores, torch.where(positions < 0, positions, positions + start)))
        start += len(chunk)
    return merge_results(found, k)


def same(found: Found, expected: Found) -> bool:
    return all(torch.equal(ours, right) for ours, right in zip(found, expected, strict=True))


def agreement(found: Found, expected: Found) -> dict:
    """How a result compares with the right one for its first queries."""
    rows, k = min(len(found[0]), len(expected[0])), found[0].shape[1]
    found, expected = (tuple(each[:rows, :k] for each in pair) for pair in (found, expected))
    right = expected[1] >= 0
    present = (expected[1][:, :, None] == found[1][:, None, :]).any(dim=2)
    return {"recall": (present & right).sum().item() / max(1, right.sum().item()), "exact": same(found, expected)}


def once(call: Callable[[], Found], cuda: bool) -> tuple[float, Found]:
    """Milliseconds of a call that starts on an idle device, and what it returned."""
    if cuda:
        torch.cuda.synchronize()
    start = mark(cuda)
    result = call()
    end = mark(cuda)
    if cuda:
        torch.cuda.synchronize()
    return 1e3 * elapsed(start, end), result


def timed(call: Callable[[], object], cuda: bool) -> dict:
    """Median, least and most milliseconds of a call, which has been made before."""
    times: list[float] = []
    while len(times) < REPEATS and sum(times) < MILLISECONDS:
        times.append(once(call, cuda)[0])
    return {"ms": statistics.median(times), "ms_min": min(times), "ms_max": max(times), "repeats": len(times)}


def measured(engine: Engine, queries: SparseBatch, k: int, expected: Found) -> dict:
    """Time, memory beyond the engine, whether results repeat, and how they compare."""
    search = partial(engine.search, queries, k)
    found = search()
    return {
        **timed(search, queries.device.type == "cuda"),
        "peak_bytes": peak_bytes(search, queries.device),
        "repeatable": same(found, search()),
        **agreement(found, expected),
    }


class Collection:
    """One collection with its queries, and what was measured of it."""

    def __init__(self, cell: dict) -> None:
        self.few = slice(2 if cell["tiny"] else None)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.queries, self.sizes = cell["queries"], BATCHES[self.few] if cell["sweep"] else ()
        self.documents = list(sparse_data.documents(cell["documents"], self.device, cell["terms"]))
        self.asked = sparse_data.queries(self.documents, max(self.queries, *self.sizes, 0))
        self.expected = exact(self.first(CHECKED), self.documents, K)
        self.measured: dict[str, dict] = {"data": sparse_data.describe(self.documents, self.asked)}

    def to_cpu(self) -> None:
        self.device = torch.device("cpu")
        self.documents = [chunk.to("cpu") for chunk in self.documents]
        self.asked, self.expected = self.asked.to("cpu"), tuple(each.cpu() for each in self.expected)

    def first(self, count: int) -> SparseBatch:
        return self.asked.select(torch.arange(min(count, len(self.asked)), device=self.asked.device))

    def measure(self, name: str, call: Callable[[], dict]) -> None:
        """Whatever an engine raises is the result."""
        try:
            self.measured[name] = call()
        except Exception as error:  # noqa: BLE001
            self.measured[name] = {"failure": failure(error)}

    def build(self, kind: str) -> Engine | None:
        """An engine, and what it took; None where it cannot be built."""
        made: list[Engine] = []
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # of the engine before

        def build() -> dict:
            began = time.perf_counter()
            peak = peak_bytes(lambda: made.append(MAKERS[kind](self.documents)), self.device)
            if peak is None:  # nothing is run to measure the memory of a CPU
                made.append(MAKERS[kind](self.documents))
            seconds = time.perf_counter() - began
            each = posting_bytes(made[0]) / sum(len(chunk.terms) for chunk in self.documents)
            return {"seconds": seconds, "nbytes": made[0].nbytes, "bytes_per_posting": each, "peak_bytes": peak}

        self.measure(f"{kind}/build", build)
        return made[0] if made else None

    def cases(self, kind: str, cases: dict[str, tuple[SparseBatch, int]]) -> None:
        """One engine with its cases by name, each a batch of queries and a k."""
        engine = self.build(kind)
        for case, (queries, k) in cases.items() if engine else ():
            self.measure(f"{kind}/{case}", partial(measured, engine, queries, k, self.expected))


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sizes", type=int, nargs="+", default=[100_000, 8_800_000, 1_000_000], help="documents")
    parser.add_argument("--sweep-size", type=int, default=1_000_000, help="documents of what is measured at one size")
    parser.add_argument("--queries", type=int, default=500)
    parser.add_argument("--tiny", action="store_true", help="two cells of each sweep")


def cells(options: argparse.Namespace) -> dict[str, dict]:
    shared = {"queries": options.queries, "tiny": options.tiny, "terms": sparse_data.DOCUMENT_TERMS, "sweep": False}
    made = {str(count): {**shared, "documents": count, "sweep": count == options.sweep_size} for count in options.sizes}
    for terms in TERMS[: 2 if options.tiny else None]:
        made[f"terms={terms}"] = {**shared, "documents": options.sweep_size, "terms": terms}
    return made | {"cpu": {**shared, "documents": min(CPU_DOCUMENTS, options.sweep_size), "cpu": True}}


def recorded(_: str, options: argparse.Namespace) -> dict:
    return {"setting": {"queries": options.queries, "checked_queries": CHECKED, "sweep_size": options.sweep_size}}


def measure(cell: dict) -> dict:
    found = Collection(cell)
    batch = found.first(cell["queries"])
    largest = {f"k={K}": (batch, K)}
    if cell.get("cpu"):
        found.to_cpu()
        found.cases("index", {f"k={K}": (found.asked, K)})
    elif cell["terms"] != sparse_data.DOCUMENT_TERMS:
        for kind in ("index", "scatter"):
            found.cases(kind, largest)
    else:
        if found.device.type == "cuda":  # compile
            few = list(sparse_data.documents(DOCUMENTS_PER_BLOCK, found.device))
            build_index(few).search(sparse_data.queries(few, 4), K)
        cases = {"k=10": (batch, 10), **largest, "one": (found.first(1), K)}
        batches = {f"batch={size}": (found.first(size), K) for size in found.sizes}
        for kind in ("index", "scatter"):
            found.cases(kind, cases | batches)
        found.cases("cusparse", cases)
    return {"measured": found.measured}


def measures(content: dict) -> dict[str, dict]:
    """What was measured, by ``collection/engine/case``."""
    return {f"{name}/{key}": each for name, cell in content["cells"].items() for key, each in cell["measured"].items()}


def sizes(cells: dict) -> list[int]:
    """Numbers of documents, ascending."""
    return sorted({int(first) for name in cells if (first := name.partition("/")[0]).isdigit()})


def _time(cell: dict) -> str:
    return time_and_memory({**cell, "peak_bytes": None})


def _faster(cells: dict, name: str, *others: str) -> list[str]:
    """How many times the time of one cell others take."""
    return [times(cells.get(other, {}).get("ms"), cells.get(name, {}).get("ms")) for other in others]


def speed_table(cells: dict) -> str:
    rows = []
    for size, (case, title) in itertools.product(sizes(cells), CASES.items()):
        names = [f"{size}/{engine}/{case}" for engine in ENGINES]
        published = f"{PUBLISHED[size]:g} ms" if case == f"k={K}" and size in PUBLISHED else ""
        entries = [*(_time(cells.get(name, {})) for name in names), *_faster(cells, *names)]
        rows.append([f"{size:,}", title, *entries, published])
    header = ["documents", "", *ENGINES.values(), "times scatter-add", "times cuSPARSE", "published scatter-add"]
    return table(header, rows)


def markdown(content: dict) -> str:
    """The tables of docs/sparse.md."""
    cells, made = measures(content), next(iter(content["cells"].values()))["environment"]
    data = next((cell for name, cell in cells.items() if name.endswith("/data")), None)
    drawn = data and (
        f" Documents of {data['terms_per_document']:.0f} terms, queries of {data['terms_per_query']:.0f}, "
        f"{data['shared_terms']:.1f} shared."
    )
    queries = f"{made['setting']['queries']} queries"
    return f"{machine(made, 'triton')}; {queries}.{drawn or ''} {LINKS}\n\n{speed_table(cells)}"


def plot(content: dict, target: Path) -> None:
    """Milliseconds of 500 queries, k = 1000, beside the results file."""
    from benchmarks.harness.plots import COLOURS, Line, curves

    cells, lines = measures(content), []
    known = {
        title: {n: cells.get(f"{n}/{engine}/k={K}", {}).get("ms") for n in sizes(cells)}
        for engine, title in ENGINES.items()
    }
    known["scatter-add, as published"] = PUBLISHED
    styles = zip((COLOURS[3], COLOURS[1], COLOURS[2], COLOURS[0]), ("o-", "s-", "s-", "^:"), strict=True)
    for (title, of_size), (colour, style) in zip(known.items(), styles, strict=True):
        points = [(size, ms) for size, ms in of_size.items() if ms is not None]
        # Times of cuSPARSE are those of scatter-add, nearly.
        texts = [] if title == ENGINES["cusparse"] else [f"{ms:.3g}" for _, ms in points]
        lines.append(Line(title.strip("`"), colour, points, style, texts=texts))
    axis = {"xlabel": "documents", "ylabel": "ms", "xscale": "log", "yscale": "log"}
    curves([(axis, lines)], target.with_suffix(".png"), f"500 queries, k = {K}")
