"""Exact search of sparse vectors on one GPU: SparseIndex, the published scatter-add kernel, and cuSPARSE on the same data.

    python -m benchmarks.retrieval.sparse_search                  # written to results/sparse_search.json
    python -m benchmarks.retrieval.sparse_search --render-only    # tables and plot of that file
    python -m benchmarks.retrieval.sparse_search --sizes 100,300 --sweep-size 300 --queries 4 --tiny --results /tmp/a.json   # on a CPU

A cell is one engine with one case: a number of queries and a k. Its time is from the call, with the device idle, to the
last kernel. The first queries of each collection are compared with float64 in the order that SparseIndex promises. At
``--sweep-size`` documents there are also batch sizes, other kernels, and queries that an encoder makes; then collections
with other numbers of terms, and the engine of a CPU. What fails is recorded and the rest goes on; after ``--seconds``
nothing more is started.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

import torch

from benchmarks.harness.paths import RESULTS
from benchmarks.harness.records import environment, write
from benchmarks.harness.timing import elapsed, mark, peak_bytes
from benchmarks.harness.workers import failure
from benchmarks.retrieval import sparse_data
from benchmarks.retrieval.sparse_baselines import CuSparse, DocumentParallel, Found, ScatterAdd
from benchmarks.retrieval.sparse_table import docs_table
from pylate_fastmaxsim import SparseBatch, SparseIndex, reference
from pylate_fastmaxsim.kernels.sparse.postings import DOCUMENTS_PER_BLOCK
from pylate_fastmaxsim.retrieval.topk import merge_results

K = 1000
BATCHES = (1, 4, 16, 64, 256, 1024)
TERMS = (10, 25, 50, 127, 250, 500)
PIPELINE_BATCHES = (1, 8, 32, 128)
CPU_DOCUMENTS = 100_000
CHECKED = 8  # queries that are compared with float64
REPEATS, MILLISECONDS = 20, 500  # a case is repeated until one of them is reached
TINY_ENCODER = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 32}


class Engine(Protocol):
    @property
    def nbytes(self) -> int: ...

    def search(self, queries: SparseBatch, k: int) -> Found: ...


def build_index(collection: list[SparseBatch]) -> SparseIndex:
    return SparseIndex.build(collection, device=collection[0].device)


ENGINES: dict[str, Callable[[list[SparseBatch]], Engine]] = {
    "index": build_index,
    "scatter": ScatterAdd,
    "cusparse": CuSparse,
    "document": DocumentParallel,
}


def posting_bytes(engine: Engine) -> int:
    """Bytes of what is scanned; an index on a GPU keeps the exact rows beside it."""
    on_gpu = isinstance(engine, SparseIndex) and engine.device.type == "cuda"
    return engine._searched.posting_bytes if on_gpu else engine.nbytes


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


def measure(engine: Engine, queries: SparseBatch, k: int, expected: Found) -> dict:
    """Time, memory beyond the engine, whether results repeat, and how they compare."""
    search = partial(engine.search, queries, k)
    found = search()
    return {
        **timed(search, queries.device.type == "cuda"),
        "peak_bytes": peak_bytes(search, queries.device),
        "repeatable": same(found, search()),
        **agreement(found, expected),
    }


class Run:
    """The cells of a run, each written as soon as it is known."""

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        self.options, self.device = options, device
        self.cuda = device.type == "cuda"
        self.few = slice(2 if options.tiny else None)
        self.ends = time.monotonic() + options.seconds
        setting = {"queries": options.queries, "checked_queries": CHECKED, "sweep_size": options.sweep_size}
        self.content: dict = {"environment": environment(), "setting": setting, "cells": {}}

    def cell(self, name: str, measure: Callable[[], dict]) -> None:
        """Measure a cell, unless the time is over. Whatever an engine raises is the result of its cell."""
        began = time.monotonic()
        if began > self.ends:
            return
        try:
            result = measure()
        except Exception as error:  # noqa: BLE001
            result = {"failure": failure(error)}
        self.content["cells"][name] = {**result, "cell_seconds": time.monotonic() - began}
        print(name, json.dumps(self.content["cells"][name]), flush=True)
        write(self.options.results, self.content)

    def engine(self, name: str, kind: str, collection: list[SparseBatch]) -> list[Engine]:
        """An engine of the collection, and a cell of what it took; an empty list where it cannot be built."""
        made: list[Engine] = []
        if self.cuda:
            torch.cuda.empty_cache()  # of the engine before

        def build() -> dict:
            began = time.perf_counter()
            peak = peak_bytes(lambda: made.append(ENGINES[kind](collection)), self.device)
            if peak is None:  # nothing is run to measure the memory of a CPU
                made.append(ENGINES[kind](collection))
            seconds = time.perf_counter() - began
            each = posting_bytes(made[0]) / sum(len(chunk.terms) for chunk in collection)
            return {"seconds": seconds, "nbytes": made[0].nbytes, "bytes_per_posting": each, "peak_bytes": peak}

        self.cell(f"{name}/{kind}/build", build)
        return made

    def cases(self, name: str, kind: str, collection: list[SparseBatch], cases: dict, expected: Found) -> None:
        """One engine: its cases by name, each a batch of queries and a k, and for an index those of the encoder."""
        for engine in self.engine(name, kind, collection):
            for case, (queries, k) in cases.items():
                self.cell(f"{name}/{kind}/{case}", partial(measure, engine, queries, k, expected))
            if kind == "index" and name == str(self.options.sweep_size):
                self.part("pipeline", partial(self.pipeline, engine))

    def draw(
        self, name: str, count: int, queries: int, terms: float = sparse_data.DOCUMENT_TERMS
    ) -> tuple[list[SparseBatch], SparseBatch, Found]:
        """A collection, queries, and what the first of them find."""
        collection = list(sparse_data.documents(count, self.device, terms))
        asked = sparse_data.queries(collection, queries)
        self.cell(f"{name}/data", partial(sparse_data.describe, collection, asked))
        return collection, asked, exact(self.first(asked, CHECKED), collection, K)

    def first(self, queries: SparseBatch, count: int) -> SparseBatch:
        return queries.select(torch.arange(min(count, len(queries)), device=self.device))

    def compile(self) -> None:
        collection = list(sparse_data.documents(min(DOCUMENTS_PER_BLOCK, self.options.sweep_size), self.device))
        build_index(collection).search(sparse_data.queries(collection, 4), K)

    def size(self, count: int) -> None:
        sizes = BATCHES[self.few] if count == self.options.sweep_size else ()
        collection, asked, expected = self.draw(f"{count}", count, max(self.options.queries, *sizes, 0))
        batch = self.first(asked, self.options.queries)
        largest = {f"k={K}": (batch, K)}
        cases = {"k=10": (batch, 10), **largest, "one": (self.first(asked, 1), K)}
        batches = {f"batch={size}": (self.first(asked, size), K) for size in sizes}
        for kind in ("index", "scatter"):
            self.cases(f"{count}", kind, collection, {**cases, **batches}, expected)
        self.cases(f"{count}", "cusparse", collection, cases, expected)
        if sizes:
            self.cases(f"{count}", "document", collection, largest, expected)

    def terms(self, terms: int) -> None:
        name = f"terms={terms}"
        collection, asked, expected = self.draw(name, self.options.sweep_size, self.options.queries, terms)
        for kind in ("index", "scatter"):
            self.cases(name, kind, collection, {f"k={K}": (asked, K)}, expected)

    def cpu(self) -> None:
        count = min(CPU_DOCUMENTS, self.options.sweep_size)
        collection, asked, expected = self.draw("cpu", count, self.options.queries)
        cases = {f"k={K}": (asked.to("cpu"), K)}
        self.cases("cpu", "index", [chunk.to("cpu") for chunk in collection], cases, tuple(x.cpu() for x in expected))

    def pipeline(self, index: SparseIndex) -> None:
        """Queries encoded, and then searched."""
        from benchmarks.retrieval import sparse_pipeline  # Sentence Transformers takes seconds to import

        encoder = sparse_pipeline.build_encoder(self.device, **(TINY_ENCODER if self.options.tiny else {}))

        def cell(size: int) -> dict:
            features = sparse_pipeline.token_ids(size, self.device)
            encode = partial(sparse_pipeline.encode, encoder, features)
            queries = encode()
            search = partial(index.search, queries, K)
            search()
            return {
                "encode": timed(encode, self.cuda),
                "search": timed(search, self.cuda),
                "both": timed(lambda: index.search(encode(), K), self.cuda),
                "terms_per_query": len(queries.terms) / size,
            }

        for size in PIPELINE_BATCHES[self.few]:
            self.cell(f"pipeline/batch={size}", partial(cell, size))

    def everything(self) -> None:
        self.part("compile", self.compile)
        for count in self.options.sizes:
            self.part(f"{count}", partial(self.size, count))
        for terms in TERMS[self.few]:
            self.part(f"terms={terms}", partial(self.terms, terms))
        self.part("cpu", self.cpu)

    def part(self, name: str, measure: Callable[[], None]) -> None:
        """Several cells; the cell of the part says how long they took, and why what they share failed."""
        self.cell(f"{name}/all", lambda: measure() or {})
        if self.cuda:
            torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS / "sparse_search.json")
    sizes = [100_000, 8_800_000, 1_000_000]
    parser.add_argument("--sizes", type=lambda text: [int(each) for each in text.split(",")], default=sizes)
    parser.add_argument("--sweep-size", type=int, default=1_000_000, help="documents of what is measured at one size")
    parser.add_argument("--queries", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=200, help="start nothing more after this time")
    parser.add_argument("--tiny", action="store_true", help="an encoder of one small layer, two cells of each sweep")
    parser.add_argument("--render-only", action="store_true", help="only tables and plot of the results file")
    options = parser.parse_args()
    if options.render_only:
        content = json.loads(options.results.read_text())
    else:
        run = Run(options, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        run.everything()
        content = run.content
    print("\n" + docs_table(content))
    if find_spec("matplotlib") is None:
        print("\nNo plot, since matplotlib is not installed; --render-only draws it later.")
        return
    from benchmarks.retrieval.sparse_plots import plot  # measuring and the tables do not need matplotlib

    plot(content["cells"], options.results)


if __name__ == "__main__":
    main()
