"""What the benchmark of sparse search concludes: ratios and tables."""

from __future__ import annotations

from benchmarks.harness.tables import table

ENGINES = {
    "index": "`SparseIndex`",
    "scatter": "scatter-add",
    "cusparse": "cuSPARSE",
}
KERNELS = {
    "index": "block and query, integers in shared memory",
    "scatter": "term and query, float atomics in global memory",
    "document": "document and query, no index",
}
# ms of 500 queries in the paper that published the scatter-add kernel.
PUBLISHED = {100_000: 7.3, 1_000_000: 393.0, 8_800_000: 635.0}
LINKS = "([numbers](../benchmarks/results/sparse_search.json), [plot](../benchmarks/results/sparse_search.png))"
CASES = {"k=10": "k = 10", "k=1000": "k = 1000", "one": "k = 1000, one query"}


def value(cells: dict, name: str, key: str = "ms") -> float | None:
    return cells.get(name, {}).get(key)


def faster(cells: dict, size: int, case: str, other: str) -> float | None:
    """How many times the time of the index another engine takes."""
    ours, theirs = (value(cells, f"{size}/{engine}/{case}") for engine in ("index", other))
    return None if ours is None or theirs is None else theirs / ours


def sizes(cells: dict) -> list[int]:
    """Numbers of documents, ascending."""
    return sorted({int(first) for name in cells if (first := name.partition("/")[0]).isdigit()})


def _ms(cells: dict, name: str) -> str:
    cell = cells.get(name, {})
    return f"{cell['ms']:.3g} ms" if "ms" in cell else cell.get("failure", "")


def _times(ours: float | None, theirs: float | None) -> str:
    return "" if ours is None or theirs is None else f"{theirs / ours:.1f}x"


def _mib(cells: dict, name: str) -> str:
    peak = value(cells, name, "peak_bytes")
    return "" if peak is None else f"{peak / 2**20:,.0f} MiB"


def speed_table(cells: dict) -> str:
    rows = []
    for size in sizes(cells):
        for case, title in CASES.items():
            entries = [_ms(cells, f"{size}/{engine}/{case}") for engine in ENGINES]
            ratios = [
                "" if (times := faster(cells, size, case, other)) is None else f"{times:.1f}x"
                for other in ("scatter", "cusparse")
            ]
            published = f"{PUBLISHED[size]:g} ms" if case == "k=1000" and size in PUBLISHED else ""
            rows.append([f"{size:,}", title, *entries, *ratios, published])
    header = ["documents", "", *ENGINES.values(), "times scatter-add", "times cuSPARSE", "published scatter-add"]
    return table(header, rows)


def memory_table(cells: dict) -> str:
    rows = []
    for size in sizes(cells):
        for engine, title in ENGINES.items():
            build = cells.get(f"{size}/{engine}/build", {})
            if "nbytes" in build:
                entries = [f"{build['seconds']:.2f} s", f"{build['nbytes'] / 2**30:.2f} GiB"]
                beyond = _mib(cells, f"{size}/{engine}/k=1000")
                rows.append([f"{size:,}", title, *entries, f"{build['bytes_per_posting']:.1f}", beyond])
    return table(["documents", "", "build", "size", "bytes a posting, without exact rows", "beyond it, k = 1000"], rows)


def exactness_table(cells: dict) -> str:
    rows = []
    for engine, title in ENGINES.items():
        found = [cell for name, cell in cells.items() if f"/{engine}/" in name and "recall" in cell]
        if found:
            exact, repeatable = (sum(cell[key] for cell in found) for key in ("exact", "repeatable"))
            least = min(cell["recall"] for cell in found)
            rows.append([title, f"{least:.6g}", f"{exact} of {len(found)}", f"{repeatable} of {len(found)}"])
    return table(["", "lowest recall", "same bits as float64", "same bits twice"], rows)


def _sweep_table(cells: dict, first: str, rows: dict[str, tuple[str, str]]) -> str:
    """Rows by title; of each the names of the cells of the index and of the scatter-add kernel."""
    lines = [
        [title, *(_ms(cells, name) for name in names), _times(*(value(cells, name) for name in names))]
        for title, names in rows.items()
        if names[0] in cells
    ]
    return table([first, *list(ENGINES.values())[:2], "times scatter-add"], lines)


def batch_table(cells: dict, size: int) -> str:
    batches = sorted({int(name.rpartition("=")[2]) for name in cells if "/index/batch=" in name})
    names = {f"{n:,}": tuple(f"{size}/{engine}/batch={n}" for engine in ("index", "scatter")) for n in batches}
    return _sweep_table(cells, "queries", names)


def terms_table(cells: dict) -> str:
    groups = sorted({name.partition("/")[0] for name in cells if name.startswith("terms=")}, key=lambda g: int(g[6:]))
    rows = {}
    for group in groups:
        shared = value(cells, f"{group}/data", "shared_terms") or 0
        title = f"{group[6:]} ({shared:.1f} shared with a query)"
        rows[title] = tuple(f"{group}/{engine}/k=1000" for engine in ("index", "scatter"))
    return _sweep_table(cells, "terms of a document", rows)


def kernels_table(cells: dict, size: int) -> str:
    rows = [
        [title, _ms(cells, f"{size}/{engine}/k=1000"), _mib(cells, f"{size}/{engine}/k=1000")]
        for engine, title in KERNELS.items()
    ]
    return table(["a program for each", "time", "memory beyond the index"], rows)


def pipeline_table(cells: dict) -> str:
    rows = []
    for name, cell in cells.items():
        size = name.rpartition("=")[2]
        if name.startswith("pipeline/") and "both" in cell:
            rows.append([size, *(f"{cell[part]['ms']:.2f} ms" for part in ("encode", "search", "both"))])
        elif name.startswith("pipeline/") and "failure" in cell:
            rows.append([size, cell["failure"], "", ""])
    return table(["queries", "encode", "search", "one after the other"], rows)


def two_gpus_table(content: dict) -> str:
    """Of the results of sparse_two_gpus.py."""
    made, ranks, rows = content["environment"], content["ranks"], []
    for cell in content["cells"].values():
        alone, shared = cell["one_ms"], cell["sharded_ms"]
        entries = [f"{alone:.2f} ms", f"{shared:.2f} ms", f"{alone / shared:.2f}x", "yes" if cell["same"] else "no"]
        rows.append([str(cell["queries"]), str(cell["k"]), *entries])
    title = f"{content['documents']:,} documents, {made['device']}, torch {made['torch']}, {made['date']}:"
    return f"{title}\n\n" + table(["queries", "k", "1 GPU", f"{ranks} GPUs", "speed", "same bits"], rows)


def docs_table(content: dict) -> str:
    """The tables of docs/sparse.md."""
    cells, made = content["cells"], content["environment"]
    data = next((cell for name, cell in cells.items() if name.endswith("/data") and "shared_terms" in cell), None)
    drawn = (
        ""
        if data is None
        else (
            f" Documents of {data['terms_per_document']:.0f} terms, queries of {data['terms_per_query']:.0f}, "
            f"{data['shared_terms']:.1f} shared."
        )
    )
    setting = content["setting"]
    size, queries = setting["sweep_size"], f"{setting['queries']} queries"
    sweep = f"{size:,} documents, k = 1000"
    parts = {
        f"{made['device']}, torch {made['torch']}, triton {made['triton']}, {made['date']}; {queries}.{drawn} "
        f"{LINKS}": (speed_table(cells)),
        f"Memory and time to build, {queries}:": memory_table(cells),
        f"Results: the first {setting['checked_queries']} queries of each cell beside float64, all of them twice:": (
            exactness_table(cells)
        ),
        f"Batch sizes, {sweep}:": batch_table(cells, size),
        f"Terms of a document, {queries}, {sweep}:": terms_table(cells),
        f"Kernels, {queries}, {sweep}:": kernels_table(cells, size),
        "Queries encoded by a SparseEncoder of BERT-base's sizes (random weights, bfloat16, 16 tokens), then searched, "
        f"{sweep}:": pipeline_table(cells),
    }
    text = "\n\n".join(f"{title}\n\n{made}" for title, made in parts.items())
    cpu = cells.get("cpu/index/k=1000", {})
    if "ms" in cpu:
        where = f"On a CPU ({made['host']}), {cells['cpu/data']['documents']:,} documents, {queries}, k = 1000"
        text += f"\n\n{where}: {cpu['ms'] / 1e3:.2f} s."
    return text
