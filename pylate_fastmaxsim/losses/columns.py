"""The tokenized columns of a batch, and what a model makes of them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from pylate_fastmaxsim.integrations.sentence_transformers.padding_free import FLATTENED
from pylate_fastmaxsim.tokens import TokenBatch

Features = dict[str, Tensor]

# Queries [Nq, Lq, d], their mask [Nq, Lq] or None, documents by query, and their floors.
Encoded = tuple[Tensor, Tensor | None, TokenBatch, Tensor | None]


def texts_in(column: Features) -> int:
    """Number of texts in a column, padded or in one row as Sentence Transformers flattens them for FlashAttention.

    Examples
    --------
    >>> texts_in({"input_ids": torch.ones(3, 5)})
    3
    >>> texts_in({"input_ids": torch.ones(1, 9), "cu_seq_lens_q": torch.tensor([0, 4, 9])})
    2
    """
    return len(column[FLATTENED]) - 1 if FLATTENED in column else len(column["input_ids"])


def by_query(counts: Sequence[int], device: torch.device) -> Tensor:
    """From column after column to all documents of the first query, then of the second: the order, ``[Nd]``, int64.

    ``counts``: the texts of each column, that of the queries first.

    Examples
    --------
    >>> by_query([2, 2, 4], torch.device("cpu"))
    tensor([0, 2, 3, 1, 4, 5])
    """
    columns = torch.arange(sum(counts[1:]), device=device).split(list(counts[1:]))
    return torch.cat([column.view(counts[0], -1) for column in columns], dim=1).reshape(-1)
