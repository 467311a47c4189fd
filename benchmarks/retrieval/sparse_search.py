"""Search of sparse vectors on the same data: on one GPU SparseIndex, the published scatter-add kernel, cuSPARSE, a dense
product and splade-index; on the CPU beside it SparseIndex, Seismic, BMP and splade-index.

    python -m benchmarks sparse_search                  # measure what is missing, then print the tables
    python -m benchmarks sparse_search --sizes 100 300 --queries 4 --results /tmp/a.json   # on a CPU

A cell is a collection of so many documents, or such a one on a CPU. It has every engine with its cases, each a number of
queries and a k. A time is from the call, with the device idle, to the last kernel. The first queries of each collection
are compared with float64 in the order that SparseIndex promises, those of a CPU with what SparseIndex finds. What fails is
recorded and the rest goes on.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch

from benchmarks.harness.tables import machine, table, time_and_memory
from benchmarks.harness.timing import DEVICE, elapsed, mark, peak_bytes, seconds_of
from benchmarks.harness.workers import or_failure
from benchmarks.retrieval import sparse_baselines as baselines
from benchmarks.retrieval import sparse_data
from benchmarks.retrieval.sparse_baselines import Found
from pylate_fastmaxsim import SparseBatch, SparseIndex, reference
from pylate_fastmaxsim.kernels.sparse.postings import DOCUMENTS_PER_BLOCK
from pylate_fastmaxsim.retrieval.batching import BatchingSearcher
from pylate_fastmaxsim.retrieval.topk import merge_results

TIMEOUT = 300
ENGINES = {
    "index": "`SparseIndex`",
    "scatter": "scatter-add",
    "cusparse": "cuSPARSE",
    "dense": "dense, compiled",
    "splade": "splade-index",
}
ON_CPU = {"index": "`SparseIndex`", "seismic": "Seismic", "bmp": "BMP", "splade": "splade-index"}
# ms of 500 queries in the paper that published the scatter-add kernel; it has 69 ms for a million, too.
PUBLISHED = {100_000: 7.3, 1_000_000: 393.0, 8_800_000: 635.0}
LINKS = "([numbers](../benchmarks/results/sparse_search.json))"
CASES = {"k=10": "k = 10", "k=1000": "k = 1000", "one": "k = 1000, one query"}
K, ON_CPU_QUERIES, ON_CPU_DOCUMENTS = 1000, 100, 1_000_000
CLIENTS = 64
WINDOWS = (0, 0.002)  # seconds
# Of memory; of minutes, to build in Python or of searches on a CPU.
SIZE_LIMITS = {"dense": 1_000_000, "splade": 1_000_000, "bmp": 100_000}
POSTING_BYTES = 3  # of a document's number and an impact
CHECKED = 8  # queries that are compared with float64
REPEATS, MILLISECONDS = 20, 500  # a case is repeated until one of them is reached


def build_index(collection: list[SparseBatch]) -> SparseIndex:
    return SparseIndex.build(collection, device=collection[0].device)


MAKERS: dict[str, Callable[[list[SparseBatch]], Any]] = {
    "index": build_index,
    "scatter": baselines.ScatterAdd,
    "cusparse": baselines.CuSparse,
    "dense": baselines.Dense,
    "splade": baselines.SpladeIndex,
    "seismic": baselines.Seismic,
    "bmp": baselines.BlockMaxPruning,
}


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


def agreement(found: Found, expected: Found, k: int) -> dict:
    """How a result compares with the right one for its first queries. Some have fewer than ``k``."""
    rows = min(len(found[0]), len(expected[0]))
    found, expected = (tuple(each[:rows, :k] for each in pair) for pair in (found, expected))
    right = expected[1] >= 0
    present = (expected[1][:, :, None] == found[1][:, None, :]).any(dim=2)
    return {"recall": (present & right).sum().item() / max(1, right.sum().item()), "exact": same(found, expected)}


def timed(call: Callable[[], object], cuda: bool) -> dict:
    """Median, least and most milliseconds of a call that has been made before, each from an idle device on."""
    times: list[float] = []
    while len(times) < REPEATS and sum(times) < MILLISECONDS:
        wait = torch.cuda.synchronize if cuda else int
        wait()
        start = mark(cuda)
        call()
        end = mark(cuda)
        wait()
        times.append(1e3 * elapsed(start, end))
    return {"ms": statistics.median(times), "ms_min": min(times), "ms_max": max(times), "repeats": len(times)}


def measured(engine: Any, queries: SparseBatch, k: int, expected: Found) -> dict:
    """Time, memory beyond the engine, whether results repeat, and how they compare."""
    asked = engine.prepare(queries) if hasattr(engine, "prepare") else queries
    search, as_found = partial(engine.search, asked, k), getattr(engine, "found", lambda each: each)
    found = [each.to(expected[0].device) for each in as_found(search())]
    return {
        **timed(search, queries.device.type == "cuda"),
        "peak_bytes": peak_bytes(search, queries.device),
        "repeatable": same(found, [each.to(expected[0].device) for each in as_found(search())]),
        **agreement(found, expected, k),
    }


class Collection:
    """One collection with its queries, and what was measured of it."""

    def __init__(self, cell: dict) -> None:
        self.device = DEVICE
        self.queries = cell["queries"]
        self.documents = list(sparse_data.documents(cell["documents"], self.device))
        self.asked = sparse_data.queries(self.documents, self.queries)
        self.measured: dict[str, dict] = {"data": sparse_data.describe(self.documents, self.asked)}
        if cell["cpu"]:
            self.expected = build_index(self.documents).search(self.first(self.queries), K)
            self.device = torch.device("cpu")
            self.documents = [chunk.to("cpu") for chunk in self.documents]
            self.asked, self.expected = self.asked.to("cpu"), tuple(each.cpu() for each in self.expected)
        else:
            self.expected = exact(self.first(CHECKED), self.documents, min(K, cell["documents"]))

    def first(self, count: int) -> SparseBatch:
        return self.asked.select(torch.arange(min(count, len(self.asked)), device=self.asked.device))

    def build(self, kind: str) -> Any:
        """An engine, and what it took; None where it cannot be built."""
        made: list[Any] = []
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # of the engine before

        def build() -> dict:
            took, engine = seconds_of(partial(MAKERS[kind], self.documents), device=self.device)
            made.append(engine)
            return {**took, "nbytes": engine.nbytes}

        self.measured[f"{kind}/build"] = or_failure(build)
        return made[0] if made else None

    def cases(self, kind: str, cases: dict[str, tuple[SparseBatch, int]]) -> None:
        """One engine with its cases by name, each a batch of queries and a k."""
        engine = self.build(kind)
        for case, (queries, k) in cases.items() if engine else ():
            self.measured[f"{kind}/{case}"] = or_failure(partial(measured, engine, queries, k, self.expected))
        if engine and kind == "index" and self.device.type == "cuda":
            for window in WINDOWS:
                of_threads = partial(served, engine, self.asked.to("cpu"), window)
                self.measured[f"index/served={window}"] = or_failure(of_threads)


def served(index: SparseIndex, queries: SparseBatch, window: float) -> dict:
    """What so many threads get that ask for one query after another, and one thread that passes as many in one call."""
    singles = [queries.select(torch.tensor([row])) for row in range(len(queries))]
    answered: list[tuple[float, float]] = []

    def search(queries: SparseBatch, k: int) -> Found:
        return tuple(each.cpu() for each in index.search(queries.to(index.device), k))

    def ask(client: int) -> None:
        for query in itertools.islice(itertools.cycle(singles), client, None):
            began = time.perf_counter()
            searcher.search(query, K)
            answered.append((began, time.perf_counter()))
            if answered[-1][1] > ends:
                break

    batch = queries.select(torch.arange(CLIENTS) % len(queries))
    alone = timed(partial(search, batch, K), False)["ms"] / 1e3
    begins = time.perf_counter() + max(0.5, alone)
    ends = begins + max(1, 3 * alone)
    with BatchingSearcher(search, window=window) as searcher, ThreadPoolExecutor(CLIENTS) as threads:
        [*threads.map(ask, range(CLIENTS))]
    latencies = [1e3 * (end - began) for began, end in answered if began >= begins]
    parts = statistics.quantiles(latencies, n=100)
    rate = sum(begins <= end < ends for _, end in answered) / (ends - begins)
    return {"ms": parts[49], "ms_99": parts[98], "per_second": rate, "per_second_in_calls": CLIENTS / alone}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sizes", type=int, nargs="+", default=[100_000, 8_800_000, 1_000_000], help="documents")
    parser.add_argument("--queries", type=int, default=500)


def cells(options: argparse.Namespace) -> dict[str, dict]:
    few, made = min(options.queries, ON_CPU_QUERIES), {}
    for count in options.sizes:
        made[str(count)] = {"documents": count, "queries": options.queries, "cpu": False}
        if count <= ON_CPU_DOCUMENTS:
            made[f"cpu/{count}"] = {"documents": count, "queries": few, "cpu": True}
    return made


def recorded(_: str, options: argparse.Namespace) -> dict:
    return {"setting": {"queries": options.queries, "checked_queries": CHECKED}}


def measure(cell: dict) -> dict:
    found = Collection(cell)
    cuda = found.device.type == "cuda"
    batch = found.first(cell["queries"])
    cases = {"k=10": (batch, 10), f"k={K}": (batch, K), "one": (found.first(1), K)}
    if cuda:
        found.measured["copy"] = copied(found.device)
        few = list(sparse_data.documents(DOCUMENTS_PER_BLOCK, found.device))  # compile
        build_index(few).search(sparse_data.queries(few, 4), K)
    for kind in ON_CPU if cell["cpu"] else ENGINES:
        if cell["documents"] <= SIZE_LIMITS.get(kind, cell["documents"]):
            found.cases(kind, cases)
    return {"measured": found.measured}


def copied(device: torch.device) -> dict:
    """Rate of a copy on the device, of bytes that are read and written."""
    memory = torch.empty(2, 2**30, dtype=torch.uint8, device=device)
    time = timed(lambda: memory[0].copy_(memory[1]), True)
    return {**time, "gb_per_second": memory.nbytes / 1e6 / time["ms"]}


def measures(content: dict) -> dict[str, dict]:
    """What was measured, by ``collection/engine/case``."""
    return {f"{name}/{key}": each for name, cell in content["cells"].items() for key, each in cell["measured"].items()}


def sizes(cells: dict, where: str = "") -> list[int]:
    """Numbers of documents, ascending."""
    first = (name.removeprefix(where).partition("/")[0] for name in cells if name.startswith(where))
    return sorted({int(each) for each in first if each.isdigit()})


def _entry(cell: dict) -> str:
    """Milliseconds, and the share of the right documents where it is not all."""
    found = f", {cell['recall']:.1%}" if cell.get("recall", 1) < 0.9995 else ""
    digits = ",.0f" if cell.get("ms", 0) >= 1000 else ".3g"
    return time_and_memory({**cell, "peak_bytes": None}, digits) + found


def speed_table(cells: dict, engines: dict[str, str], where: str = "") -> str:
    known, rows = {part for name in cells for part in name.split("/")}, []
    engines = {engine: title for engine, title in engines.items() if engine in known}
    for size, (case, title) in itertools.product(sizes(cells, where), CASES.items()):
        entries = [_entry(cells.get(f"{where}{size}/{engine}/{case}", {})) for engine in engines]
        published = f"{PUBLISHED[size]:g} ms" if case == f"k={K}" and size in PUBLISHED else ""
        rows.append([f"{size:,}", title, *entries, *([] if where else [published])])
    return table(["documents", "", *engines.values(), *([] if where else ["scatter-add, as published"])], rows)


def scanned(cells: dict, queries: int) -> str:
    """The rate at which the largest search reads postings, beside that of a copy."""
    size = max(sizes(cells), default=0)
    data, found, copy = (cells.get(f"{size}/{name}", {}) for name in ("data", f"index/k={K}", "copy"))
    if "gb_per_second" not in copy:
        return ""
    read = POSTING_BYTES * queries * data["shared_terms"] * size / 1e9 / found["ms"]
    return f" Of {size:,} documents it reads {read:.1f} TB of postings a second; a copy moves {copy['gb_per_second'] / 1e3:.1f}."


def serving(cells: dict) -> str:
    """What threads get that ask for one query after another, in the larger collection and by the better window."""
    found = [
        (size, cell)
        for size in sizes(cells)
        for name, cell in cells.items()
        if name.startswith(f"{size}/index/served=") and "per_second" in cell
    ]
    if not found:
        return ""
    size, best = max(found, key=lambda each: (each[0], each[1]["per_second"]))
    return (
        f" {CLIENTS} threads get {best['per_second']:,.0f} answers a second from {size:,} documents by `BatchingSearcher`, "
        f"each in {best['ms']:.3g} ms (99%: {best['ms_99']:.3g}); calls of {CLIENTS}, {best['per_second_in_calls']:,.0f}."
    )


def markdown(content: dict) -> str:
    """The tables of docs/sparse.md."""
    cells, made = measures(content), next(iter(content["cells"].values()))["environment"]
    data, queries = next(cell for name, cell in cells.items() if name.endswith("/data")), made["setting"]["queries"]
    drawn = (
        f"Documents of {data['terms_per_document']:.0f} terms, queries of {data['terms_per_query']:.0f}, "
        f"{data['shared_terms']:.1f} shared.{scanned(cells, queries)}{serving(cells)} {LINKS}"
    )
    tables = [f"{machine(made, 'triton')}; {queries} queries. {drawn}", speed_table(cells, ENGINES)]
    if sizes(cells, "cpu/"):
        hosts = {size: content["cells"][f"cpu/{size}"]["environment"]["host"] for size in sizes(cells, "cpu/")}
        hosts = "; ".join(f"{size:,} documents: {host}" for size, host in hosts.items())
        tables += [
            f"{hosts}. {min(queries, ON_CPU_QUERIES)} queries.",
            speed_table(cells, ON_CPU, "cpu/"),
        ]
    return "\n\n".join(tables)
