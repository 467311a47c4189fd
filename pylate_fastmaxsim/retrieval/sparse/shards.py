"""What the ranks that share an index must agree on."""

from typing import NamedTuple

import torch

from pylate_fastmaxsim.ops.gathered import all_gather, rank_and_ranks
from pylate_fastmaxsim.retrieval.sparse.files import State
from pylate_fastmaxsim.sparse import SparseBatch


class Shard(NamedTuple):
    """The part of an index that a rank has loaded."""

    rank: int
    ranks: int
    first: int  # position of its first document
    documents: int  # of all ranks


def require_same_on_all_ranks(where: str, shard: Shard, queries: SparseBatch, k: int, state: State) -> None:
    """Raise the same ValueError on all ranks unless they ask the same of one ``state`` of the index."""
    rank, ranks = rank_and_ranks()
    if (rank, ranks) != (shard.rank, shard.ranks):
        raise ValueError(
            f"{where}: the index was loaded for rank {shard.rank} of {shard.ranks}, but this is rank {rank} of {ranks} of the "
            "default process group."
        )
    if ranks == 1:  # there may be no process group
        return
    # Any sum of all numbers that changes with their order.
    numbers = torch.cat([queries.offsets, queries.terms.long(), queries.weights.double().view(torch.int64)])
    sum_of_all = (numbers * torch.arange(1, 2 * len(numbers), 2, device=numbers.device)).sum()
    numbers = [k, state.written, int(state.identity, 16) >> 1]
    asked = all_gather(torch.stack([sum_of_all, *sum_of_all.new_tensor(numbers)]))
    if bool((asked[:, 2:] != asked[0, 2:]).any()):
        raise ValueError(f"{where}: ranks have loaded different states of the index; load it again on all ranks.")
    if bool((asked != asked[0]).any()):
        raise ValueError(f"{where}: all ranks must pass the same queries and k, since each searches its share for all.")
