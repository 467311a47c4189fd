"""Exact search beside indexes that prune: ``indexes.Exact``, fast-plaid, and the hosts' own scoring of every document.

    python -m benchmarks exact_search                       # with PyLate: fast-plaid and PyLate's scoring as well
    python -m benchmarks exact_search --only '*/sentence_transformers'   # in an environment of MultiVectorEncoder
    python -m benchmarks exact_search --devices 2 --only '*/bfloat16*'   # documents divided between two GPUs
    python -m benchmarks exact_search --share 0.002 --dim 16 --only 'fiqa/*'   # a trial, also on a CPU

Shapes are those of FiQA, Quora, a million passages and MS MARCO. Vectors of length 1 lie around 8,000 centres, lengths are
uniform from half of the mean to one and a half, and a query is 32 tokens of a document, moved a little. All systems are
given the same vectors and return the ten best on the host; fast-plaid, which takes seconds, of 256 queries, once.
``recall`` is the share of the ten best in float64 of 32 queries, where what scores as much as the tenth counts. The hosts
score the first 20,000 documents; their rate for all is extrapolated. ``add`` is 100,000 documents more, of NumPy as
``encode`` returns them, until they are found, beside copying their vectors to the GPU in one piece. ``memory`` searches
residual codes of 2 bits of random numbers, which are searched as fast as any, and ``disk`` those of 2 million documents in
a corpus, for the first time after its pages have left the memory; ``streamed_bytes`` is the most memory of the GPU.
"""

from __future__ import annotations

import argparse
import functools
import os
import tempfile
from collections.abc import Callable, Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import normalize, pad

from benchmarks.harness.tables import table, times
from benchmarks.harness.timing import DEVICE, seconds_of
from pylate_fastmaxsim import CompressedBatch, ResidualCodec, TokenBatch, reference
from pylate_fastmaxsim.compressed import Residual
from pylate_fastmaxsim.indexes import Exact
from pylate_fastmaxsim.retrieval.corpus import write_corpus
from pylate_fastmaxsim.retrieval.search import search

TIMEOUT = 300
# Documents, tokens of a document on average, queries.
SHAPES = {"fiqa": (57_600, 130, 648), "quora": (523_000, 16, 1000), "million": (1_000_000, 80, 648)}
MARCO, ON_DISK = (8_800_000, 70, 1000), 2_000_000
QUERY_TOKENS, CENTRES, K = 32, 8000, 10
CHECKED, SCORED, MORE = 32, 20_000, 100_000  # queries; documents that the hosts score; documents that are added
PLAID_QUERIES = 256


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--share", type=float, default=1.0, help="of the documents, for a trial")
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--devices", type=int, default=1, help="GPUs that share the documents")


def cells(options: argparse.Namespace) -> dict[str, dict]:
    ways = ["bfloat16", "int8"]
    ways += [f"fast-plaid {version('fast-plaid').rsplit('.', 1)[0]}"] if find_spec("fast_plaid") else []
    ways += ["pylate"] if find_spec("pylate") else []
    ways += ["sentence_transformers"] if find_spec("sentence_transformers.multi_vector_encoder") else []
    named = [(shape, way) for shape in SHAPES for way in ways]
    named += [("million", "add"), ("marco", "memory"), ("marco", "disk")]
    size = {"share": options.share, "dim": options.dim, "devices": options.devices}
    many = f" on {options.devices}" if options.devices > 1 else ""
    return {f"{shape}/{way}{many}": {"shape": shape, "way": way, **size} for shape, way in named}


def _data(shape: str, share: float, dim: int) -> tuple[list[Tensor], Tensor, Tensor]:
    """Documents and queries on the device, and the exact scores of some queries, float64 ``[CHECKED, N]``."""
    count, mean, queries = SHAPES[shape]
    count = int(count * share)
    generator, draw = torch.Generator(DEVICE).manual_seed(0), torch.Generator().manual_seed(1)
    centres = normalize(torch.randn(CENTRES, dim, generator=generator, device=DEVICE), dim=-1)
    sizes = torch.randint(mean // 2, mean * 3 // 2 + 1, (count,), generator=torch.Generator().manual_seed(0))
    parts, exact = [], []
    for part in sizes.split(1 << 14):
        near = torch.randint(CENTRES, (int(part.sum()),), generator=generator, device=DEVICE)
        noise = torch.randn(len(near), dim, generator=generator, device=DEVICE)
        parts.append(normalize(centres[near].add_(noise, alpha=0.06), dim=-1).bfloat16())
    batch = TokenBatch.from_packed(torch.cat(parts), pad(sizes.cumsum(0), (1, 0)).to(DEVICE))
    documents, asked = list(batch.values.split(sizes.tolist())), []
    for at in torch.randint(count, (queries,), generator=draw).tolist():
        tokens = torch.randint(len(documents[at]), (QUERY_TOKENS,), generator=draw)
        noise = 0.05 * torch.randn(QUERY_TOKENS, dim, generator=draw)
        asked.append(normalize(documents[at][tokens.to(DEVICE)].float() + noise.to(DEVICE), dim=-1).bfloat16())
    asked = torch.stack(asked)
    few = TokenBatch.from_padded(asked[:CHECKED].double())
    for rows in torch.arange(count, device=DEVICE).split((1 << 18) // mean):
        some = batch.select(rows)
        exact.append(reference.maxsim(few, some.with_values(some.values.double())))
    return documents, asked, torch.cat(exact, dim=1)


def _seconds(call: Callable[[], object], repeats: int = 1) -> tuple[float, object]:
    measured, result = seconds_of(call, repeats)
    return measured["seconds"], result


def _recall(found: list[list[int]], exact: Tensor) -> float:
    tenth = exact.topk(K, dim=1).values[:, -1:]
    scores = exact.gather(1, torch.tensor([row[:K] for row in found[:CHECKED]], device=exact.device))
    return (scores >= tenth - 1e-5).double().mean().item()


def _searched(
    search: Callable[[Tensor], list[list[int]]], queries: Tensor, exact: Tensor, repeats: int = 3, warm_up: int = 9999
) -> dict:
    search(queries[:warm_up]), search(queries[:1])
    seconds, found = _seconds(lambda: search(queries), repeats)
    one = _seconds(lambda: search(queries[:1]), 9)[0]
    made = {"seconds": seconds, "queries_per_second": len(queries) / seconds, "one_ms": one * 1e3}
    return made | {"recall": _recall(found, exact)}


def measure(cell: dict) -> dict:
    if cell["shape"] == "marco":
        return {"status": "ok", **(_disk if cell["way"] == "disk" else _memory)(cell)}
    way = cell["way"].split()[0]
    measured = {"fast-plaid": _plaid, "pylate": _scored, "sentence_transformers": _scored, "add": _add}.get(way, _exact)
    return {"status": "ok", **measured(cell, *_data(cell["shape"], cell["share"], cell["dim"]))}


def _built(cell: dict, documents: list[Tensor], format: str):
    many = [f"cuda:{number}" for number in range(cell["devices"])] if cell["devices"] > 1 else DEVICE
    return _seconds(lambda: Exact(format=format, device=many).add_documents(range(len(documents)), documents))


def _exact(cell: dict, documents: list[Tensor], queries: Tensor, exact: Tensor) -> dict:
    seconds, index = _built(cell, documents, cell["way"])
    queries, found = queries.cpu().float(), []

    def search(some: Tensor) -> list[list[int]]:
        found[:] = index(some, k=K)
        return [[each["id"] for each in row] for row in found]

    loaded = _seconds(lambda: search(queries[:1]))[0]
    made = _searched(search, queries, exact)
    search(queries)
    # The same bits, whatever the number of GPUs.
    scores = sum(hash(each["score"]) * (place + 1) for row in found for place, each in enumerate(row))
    return {"build_seconds": seconds, "load_seconds": loaded, "checksum": scores % (1 << 62), **made}


def _plaid(cell: dict, documents: list[Tensor], queries: Tensor, exact: Tensor) -> dict:
    from fast_plaid.search import FastPlaid

    queries = queries[:PLAID_QUERIES].cpu().float()
    with tempfile.TemporaryDirectory() as folder:
        on_host = [each.half().cpu() for each in documents]
        seconds = _seconds(lambda: FastPlaid(folder, device=DEVICE.type).create(on_host))[0]
        index, made = FastPlaid(folder, device=DEVICE.type, low_memory=False), {}
        for name, options in (("", {}), ("probes_32_", {"n_ivf_probe": 32, "n_full_scores": 8192})):

            def search(some: Tensor, options: dict = options) -> list[list[int]]:
                found = index.search(some, top_k=K, show_progress=False, **options)
                return [[at for at, _ in row] for row in found]

            made |= {f"{name}{key}": value for key, value in _searched(search, queries, exact, 1, 8).items()}
    return {"build_seconds": seconds, **made}


def _scored(cell: dict, documents: list[Tensor], queries: Tensor, exact: Tensor) -> dict:
    """The host's own scores, of all documents in its chunks, and the best."""
    some = documents[:SCORED]
    if cell["way"] == "pylate":
        from benchmarks.retrieval.corpus_search import stock_search

        chunks = [TokenBatch.from_list(some[at : at + 512]) for at in range(0, len(some), 512)]
        search = functools.partial(stock_search, chunks=chunks, k=K, dtype=torch.bfloat16)
    else:
        from sentence_transformers.util import maxsim

        def search(asked: Tensor) -> tuple[Tensor, Tensor]:
            return maxsim(asked, some).topk(K)

    made = _searched(lambda asked: search(asked)[1].tolist(), queries, exact[:, : len(some)])
    share = len(some) / len(documents)
    rates = {"queries_per_second": made["queries_per_second"] * share, "one_ms": made["one_ms"] / share}
    return {**made, **rates, "documents": len(some)}


def _add(cell: dict, documents: list[Tensor], queries: Tensor, exact: Tensor) -> dict:
    _, index = _built(cell, documents, "bfloat16")
    index(queries[:1])
    more = [each.cpu().float().numpy() for each in documents[: int(MORE * cell["share"])]]
    named = [f"new {number}" for number in range(len(more))]
    seconds = _seconds(lambda: index.add_documents(named, more)(queries[:1]))[0]
    copied = _seconds(lambda: torch.cat([*map(torch.from_numpy, more)]).bfloat16().to(DEVICE), 3)[0]
    return {"add_seconds": seconds, "copy_seconds": copied, "tokens": sum(map(len, more))}


def _memory(cell: dict) -> dict:
    (count, mean, queries), dim = MARCO, cell["dim"]
    count = int(count * cell["share"])
    generator, codec = _marco_codec(dim)
    batches = []
    for part in torch.arange(count).split(200_000):
        tokens = len(part) * mean
        codes = torch.randint(len(codec.centroids), (tokens,), generator=generator, device=DEVICE, dtype=torch.int32)
        packed = torch.randint(256, (tokens, dim // 4), generator=generator, device=DEVICE, dtype=torch.uint8)
        starts = torch.arange(0, tokens, mean, device=DEVICE)
        residual = Residual(codes, packed, torch.ones(tokens, device=DEVICE), codec)
        batches.append(CompressedBatch(residual, starts, torch.full_like(starts, mean), mean, gapless=True))
    asked, one = _marco_queries(queries, dim, generator)
    search(one, batches, K)
    seconds, alone = (_seconds(lambda some=some: search(some, batches, K), 3)[0] for some in (asked, one))
    held = torch.cuda.memory_allocated() if DEVICE.type == "cuda" else None
    return {"seconds": seconds, "queries_per_second": queries / seconds, "one_ms": alone * 1e3, "bytes": held}


def _marco_codec(dim: int) -> tuple[torch.Generator, ResidualCodec]:
    generator = torch.Generator(DEVICE).manual_seed(0)
    sample = normalize(torch.randn(1 << 16, dim, generator=generator, device=DEVICE), dim=-1)
    return generator, ResidualCodec.train(sample, 2, min(1 << 15, len(sample) // 4)).to(DEVICE)


def _marco_queries(count: int, dim: int, generator: torch.Generator) -> tuple[TokenBatch, TokenBatch]:
    asked = torch.randn(count, QUERY_TOKENS, dim, generator=generator, device=DEVICE)
    asked = TokenBatch.from_padded(normalize(asked, dim=-1).bfloat16())
    return asked, asked.select(torch.zeros(1, dtype=torch.int64, device=DEVICE))


def _disk(cell: dict) -> dict:
    (_, mean, queries), dim, count = MARCO, cell["dim"], int(ON_DISK * cell["share"])
    generator, codec = _marco_codec(dim)

    def batches() -> Iterator[Tensor]:
        for part in torch.arange(count).split(16_384):
            yield normalize(torch.randn(len(part), mean, dim, generator=generator, device=DEVICE), dim=-1).bfloat16()

    with tempfile.TemporaryDirectory() as folder:
        writing, corpus = _seconds(lambda: write_corpus(folder, batches(), format=codec))
        asked, one = _marco_queries(queries, dim, generator)
        search(one, corpus.batches(DEVICE, end=1), K)
        for file in Path(folder).iterdir():
            with file.open("rb") as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if DEVICE.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        first = _seconds(lambda: search(asked, corpus, K))[0]
        seconds, alone = (_seconds(lambda some=some: search(some, corpus, K), 2)[0] for some in (asked, one))
        held = torch.cuda.max_memory_allocated() if DEVICE.type == "cuda" else None
    made = {"seconds": seconds, "queries_per_second": queries / seconds, "one_ms": alone * 1e3}
    made |= {"build_seconds": writing, "first_seconds": first, "streamed_bytes": held}
    return made | {"documents": count, "bytes_on_disk": corpus.nbytes}


def markdown(content: dict) -> str:
    """Queries a second, one query, building and recall, beside how many times fast-plaid's rate at its defaults."""
    cells, rows = content["cells"], []
    plaid = {each["shape"]: each for each in reversed(cells.values()) if "plaid" in each["way"]}
    for name, cell in cells.items():
        rate, build, recall = (cell.get(key) for key in ("queries_per_second", "build_seconds", "recall"))
        shown = [cell.get("status", cell.get("failure")), "", ""]
        if rate:
            gain = times(rate, plaid.get(cell["shape"], {}).get("queries_per_second"))
            shown = [f"{rate:,.0f}", gain, f"{cell['one_ms']:,.2f} ms"]
        rows.append([name, *shown, f"{build:.1f} s" if build else "", f"{recall:.3f}" if recall else ""])
    return table(["search", "queries a second", "of fast-plaid's", "one query", "building", "recall"], rows)
