"""Search on one GPU and on several, each of which holds a share of the blocks: the same index, in one run.

    python -m benchmarks sparse_two_gpus

The first rank writes the index to a folder (4 bytes a posting: 5 GB). All ranks search their shares and merge over NCCL;
then the first searches all of it alone. Times are those of the slowest rank.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.retrieval import sparse_data
from benchmarks.retrieval.sparse_baselines import Found
from benchmarks.retrieval.sparse_search import K, once, same
from pylate_fastmaxsim import SparseIndex

TIMEOUT = 600
REPEATS = 15


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--documents", type=int, default=8_800_000)
    parser.add_argument("--queries", type=int, default=500)


def cells(options: argparse.Namespace) -> dict[str, dict]:
    return {"all": {"documents": options.documents, "queries": options.queries, "ranks": options.ranks}}


def median(search: Callable[[], Found], cuda: bool) -> tuple[float, Found]:
    """Median milliseconds, and the result; as often on each rank, since ranks wait for one another."""
    found = search()
    return statistics.median(once(search, cuda)[0] for _ in range(REPEATS)), found


def measure(cell: dict) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_rank, (cell, Path(folder)), cell["ranks"])
        return json.loads(Path(folder, "result.json").read_text())


def _rank(rank: int, cell: dict, folder: Path) -> None:
    cuda, ranks = torch.cuda.is_available(), cell["ranks"]
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", f"file://{folder}/group", rank=rank, world_size=ranks)
    collection = list(sparse_data.documents(cell["documents"], device))
    asked = sparse_data.queries(collection, cell["queries"])  # the same on all ranks
    if rank == 0:
        SparseIndex.build(collection, folder=folder / "index")
    del collection
    dist.barrier()
    single = asked.select(torch.zeros(1, dtype=torch.int64, device=device))
    cases = {"k=10": (asked, 10), f"k={K}": (asked, K), "one": (single, K)}

    def measured(index: SparseIndex) -> dict[str, tuple[float, Found]]:
        return {name: median(partial(index.search, *case), cuda) for name, case in cases.items()}

    sharded = measured(SparseIndex.load(folder / "index", device=device, shard=(rank, ranks)))
    slowest = torch.tensor([ms for ms, _ in sharded.values()], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    if rank == 0:
        whole, found = measured(SparseIndex.load(folder / "index", device=device)), {}
        for (name, (queries, k)), ms in zip(cases.items(), slowest.tolist(), strict=True):
            alike = same(whole[name][1], sharded[name][1])
            found[name] = {"queries": len(queries), "k": k, "one_ms": whole[name][0], "sharded_ms": ms, "same": alike}
        (folder / "result.json").write_text(json.dumps({"cases": found}))
    dist.barrier()
    dist.destroy_process_group()
