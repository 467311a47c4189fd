"""``pool_tokens`` at factor 2 beside SciPy, with which the hosts cluster document by document.

    python -m benchmarks token_pooling                               # one GPU, about two minutes
    python -m benchmarks token_pooling --share 0.01 --only tokens/80   # a trial, also on a CPU

``distances`` compares clusters with SciPy's, of distances in float64: 10,000 documents of 5 to 768 tokens without equal
ones, and 1,000 with many; means with those in float64; and on a GPU heights of all merges. ``tokens`` is the time of 4,096
documents of so many, and that of SciPy's clusters in float32, without means, on one core and in 16 processes.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import os

import numpy as np
import torch
from scipy.cluster import hierarchy
from scipy.spatial.distance import squareform
from torch.nn.functional import normalize

from benchmarks.harness.tables import mebibytes, table, times
from benchmarks.harness.timing import DEVICE, peak_bytes, seconds_of, time_calls
from pylate_fastmaxsim import TokenBatch, pool_tokens

PROCESS_OF = ()
FACTOR, DIM, PROCESSES = 2, 128, 16
DOCUMENTS = {"distinct": (10_000, 768), "equal": (1_000, 300)}  # of which distances: documents, most tokens
TOKENS, TIMED, ON_SCIPY = (80, 180, 300, 768), 4096, 1 << 14  # the last: tokens that a process clusters


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--share", type=float, default=1.0, help="of the documents, for a trial")


def cells(options: argparse.Namespace) -> dict[str, dict]:
    named = [*(("distances", each) for each in DOCUMENTS), *(("tokens", each) for each in TOKENS)]
    return {f"{key}/{value}": {key: value, "share": options.share} for key, value in named}


def measure(cell: dict) -> dict:
    return {"status": "ok", **(_clusters if "distances" in cell else _time)(cell)}


@functools.cache
def _processes():
    return multiprocessing.get_context("spawn").Pool(min(PROCESSES, os.cpu_count()), torch.set_num_threads, (1,))


def _document(tokens: int, seed: int, equal: bool = False) -> np.ndarray:
    """Vectors of length 1; with ``equal`` all inner products are multiples of 1/4."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, DIM, generator=generator)
    groups = torch.randint(max(1, tokens // 6), (tokens,), generator=generator)
    x += 1.5 * x[:1] + torch.randn(tokens, DIM, generator=generator)[groups]
    if equal:
        x = torch.zeros(tokens, DIM).scatter_(1, x[:, :16].argsort(dim=1)[:, :4], x[:, :4].sign() / 2)
    return normalize(x, dim=-1).numpy()


def scipy_merges(vectors: np.ndarray, dtype: type = np.float64) -> tuple[np.ndarray, np.ndarray]:
    """The cluster of each token from 0, and the height of each merge."""
    vectors = vectors.astype(dtype)
    merges = hierarchy.linkage(squareform(np.clip(1 - vectors @ vectors.T, 0, 2), checks=False), method="ward")
    labels = hierarchy.fcluster(merges, t=max(len(vectors) // FACTOR, 1), criterion="maxclust")
    return labels.astype(np.int64) - 1, merges[:, 2]


def _clustered(document: tuple[int, int, bool]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    vectors = _document(*document)
    return vectors, *scipy_merges(vectors)


def _clusters(cell: dict) -> dict:
    count, most = DOCUMENTS[cell["distances"]]
    lengths = torch.linspace(5, most, int(count * cell["share"])).long()
    wanted = [(length, seed, cell["distances"] == "equal") for seed, length in enumerate(lengths.tolist())]
    documents, labels, heights = zip(*_processes().map(_clustered, wanted, chunksize=16), strict=True)
    batch = TokenBatch.from_list([torch.from_numpy(each).to(DEVICE) for each in documents])
    pooled = pool_tokens(batch, FACTOR).values
    made = {"documents": len(documents), "repeatable": torch.equal(pooled, pool_tokens(batch, FACTOR).values)}
    arguments = batch.values, batch.starts, batch.lengths, None, batch.max_length, float(FACTOR), 0, 0
    rows, starts, _ = torch.ops.pylate_fastmaxsim.token_clusters(*arguments)
    expected = torch.from_numpy(np.concatenate(labels)).to(DEVICE) + starts.repeat_interleave(batch.lengths)
    made["same_clusters"] = sum(map(torch.equal, *(each.cpu().split(lengths.tolist()) for each in (rows, expected))))
    means = torch.zeros_like(pooled, dtype=torch.float64).index_add_(0, expected, batch.values.double())
    means /= expected.bincount(minlength=len(means)).clamp(min=1)[:, None]
    made["means_error"] = (means - pooled).abs().max().item()
    if DEVICE.type == "cuda":
        from pylate_fastmaxsim.kernels.token_pooling.launch import _link

        into, steps = torch.empty((2, len(rows)), dtype=torch.int32, device=DEVICE)
        found, live = torch.empty(len(rows), dtype=torch.float64, device=DEVICE), batch.lengths
        _link(batch.values, None, batch.starts, live, live, live // FACTOR, into, found, steps, batch.max_length)
        of_each = zip(found.cpu().split(lengths.tolist()), heights, strict=True)
        made["heights_error"] = max(float(np.abs(np.sort(own[:-1]) - each).max()) for own, each in of_each)
    return made


def _time(cell: dict) -> dict:
    tokens, count = cell["tokens"], int(TIMED * cell["share"])
    some = [_document(tokens, seed) for seed in range(min(count, 64))]
    batch = TokenBatch.from_padded(torch.from_numpy(np.stack(some)).to(DEVICE).repeat(-(-count // len(some)), 1, 1))
    made, number = {"documents": len(batch)}, max(4, int(cell["share"] * ON_SCIPY) // tokens)
    for key, processes in (("scipy_all_seconds", PROCESSES), ("scipy_seconds", 1)):
        documents = [some[n % len(some)] for n in range(number * processes)]
        cluster = functools.partial(scipy_merges, dtype=np.float32)
        call = functools.partial(_processes().map, cluster, documents, chunksize=number)
        made[key] = seconds_of(call, 3, torch.device("cpu"))[0]["seconds"] / len(documents)
    pool = functools.partial(pool_tokens, batch, FACTOR)
    return {**made, **time_calls([pool], at_once=1), "peak_bytes": peak_bytes(pool)}


def markdown(content: dict) -> str:
    """Time of a document beside SciPy's, and below how many documents have its clusters."""
    rows, notes = [], []
    for cell in content["cells"].values():
        if "ms" in cell:
            own, one, many = cell["ms"] / 1e3 / cell["documents"], cell["scipy_seconds"], cell.get("scipy_all_seconds")
            shown = [
                str(cell["tokens"]),
                f"{one * 1e3:.2f} ms",
                f"{many * 1e6:,.0f} us" if many else "",
                f"{own * 1e6:,.2f} us",
            ]
            rows.append([*shown, times(one, own, ",.0f"), times(many, own, ",.0f"), mebibytes(cell["peak_bytes"])])
        elif "same_clusters" in cell:
            alike = f"{cell['same_clusters']:,} of {cell['documents']:,} documents with {cell['distances']} distances"
            errors = (f"{key[:-6]} differ by at most {cell[key]:.1g}" for key in cell if key.endswith("_error"))
            notes.append(f"{alike} have SciPy's clusters; {', '.join(errors)}.")
    head = ["tokens", "SciPy, one core", "16 processes", "`pool_tokens`", "of one core", "of 16 processes", "memory"]
    return "\n\n".join([table(head, rows), *notes])
