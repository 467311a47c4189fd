"""What a collator adds to its batch: how many tokens each text has."""

from __future__ import annotations

from torch import Tensor

from pylate_fastmaxsim.integrations.encoding.batch import has_gaps
from pylate_fastmaxsim.integrations.encoding.token_counts import TOKEN_TOTAL, TokenCounts

_MASK = "_attention_mask"


def add_token_counts(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The batch, with counts beside the mask of every column.

    Counting on the CPU, in a worker, spares waiting for the GPU.

    Examples
    --------
    >>> import torch
    >>> add_token_counts({"query_attention_mask": torch.tensor([[1, 1, 0], [1, 0, 0]])})["query_token_total"].tolist()
    [[2, 3], [1, 3]]
    """
    for key in [key for key in batch if key.endswith(_MASK)]:
        # A mask with gaps cannot be packed, and is found without counts.
        if not has_gaps(batch[key]):
            batch[f"{key.removesuffix(_MASK)}_{TOKEN_TOTAL}"] = TokenCounts.of(batch[key])
    return batch
