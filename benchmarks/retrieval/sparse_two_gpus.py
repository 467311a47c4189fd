"""Search on one GPU and on several, each of which holds a share of the blocks: the same index, in one run.

    torchrun --nproc-per-node 2 -m benchmarks.retrieval.sparse_two_gpus --folder /tmp/index

Rank 0 writes the index to ``--folder``, which must not exist yet (4 bytes a posting: 5 GB). All ranks search their shares
and merge over NCCL; then rank 0 searches all of it alone. Times are those of the slowest rank.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.harness.paths import RESULTS
from benchmarks.harness.records import environment, write
from benchmarks.retrieval import sparse_data
from benchmarks.retrieval.sparse_baselines import Found
from benchmarks.retrieval.sparse_search import K, once, same
from benchmarks.retrieval.sparse_table import two_gpus_table
from pylate_fastmaxsim import SparseIndex

REPEATS = 15


def measure(search: Callable[[], Found], cuda: bool) -> tuple[float, Found]:
    """Median milliseconds, and the result; as often on each rank, since ranks wait for one another."""
    found = search()
    return statistics.median(once(search, cuda)[0] for _ in range(REPEATS)), found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="of the index, which is written there")
    parser.add_argument("--documents", type=int, default=8_800_000)
    parser.add_argument("--queries", type=int, default=500)
    parser.add_argument("--results", type=Path, default=RESULTS / "sparse_two_gpus.json")
    options = parser.parse_args()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    collection = list(sparse_data.documents(options.documents, device))
    asked = sparse_data.queries(collection, options.queries)  # the same on all ranks
    if rank == 0:
        SparseIndex.build(collection, folder=options.folder)
    del collection
    dist.barrier()
    single = asked.select(torch.zeros(1, dtype=torch.int64, device=device))
    cases = {"k=10": (asked, 10), f"k={K}": (asked, K), "one": (single, K)}

    def measured(index: SparseIndex) -> dict[str, tuple[float, Found]]:
        return {name: measure(partial(index.search, *case), cuda) for name, case in cases.items()}

    sharded = measured(SparseIndex.load(options.folder, device=device, shard=(rank, ranks)))
    slowest = torch.tensor([ms for ms, _ in sharded.values()], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    if rank == 0:
        content = {"environment": environment(), "documents": options.documents, "ranks": ranks, "cells": {}}
        whole = measured(SparseIndex.load(options.folder, device=device))
        for (name, (queries, k)), sharded_ms in zip(cases.items(), slowest.tolist(), strict=True):
            one_ms, found = whole[name]
            content["cells"][name] = {
                "queries": len(queries),
                "k": k,
                "one_ms": one_ms,
                "sharded_ms": sharded_ms,
                "same": same(found, sharded[name][1]),
            }
        write(options.results, content)
        print(two_gpus_table(content))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
