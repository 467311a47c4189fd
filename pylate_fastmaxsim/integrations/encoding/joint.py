"""Queries and documents of a batch in one call of a packed encoder."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pylate_fastmaxsim.integrations.encoding.attention import packed_mask
from pylate_fastmaxsim.integrations.encoding.batch import attended_tokens
from pylate_fastmaxsim.integrations.models.encoders import positions


# Never traced: as a part of a compiled loss it would be compiled again as batches vary.
@torch.compiler.disable
def joint_call(core: nn.Module, documents: dict[str, Tensor], queries: dict[str, Tensor]) -> dict[str, Tensor]:
    """The call that encodes queries behind packed documents, in the same row.

    All tokens of a query are encoded, and only those in its mask are attended to, as in the padded batch: query
    expansion scores masked tokens. These must come last. Waits for the device if the queries have no token counts.

    Parameters
    ----------
    core
        A ``pylate.models.ColBERT``; its ``query_length`` bounds Lq.
    documents
        The call of :func:`~pylate_fastmaxsim.integrations.encoding.plans.packed_plan`, of T tokens.
    queries
        Nq tokenized queries: ``input_ids`` and ``attention_mask``, ``[Nq, Lq]``.

    Returns
    -------
    dict of Tensor
        Features of one row, T tokens of documents and then Nq * Lq of queries.
    """
    count, length = queries["input_ids"].shape
    attended, ends, _ = attended_tokens([queries], queries["attention_mask"])
    tokens = documents["input_ids"].shape[1]
    appended = {
        "input_ids": queries["input_ids"],
        "position_ids": positions(core, queries["input_ids"]),
        "token_type_ids": queries.get("token_type_ids", torch.zeros_like(queries["input_ids"])),
    }
    call = {
        key: torch.cat([values, appended[key].reshape(1, -1)], dim=1)
        for key, values in documents.items()
        if key != "attention_mask"
    }
    of_documents = documents["attention_mask"]
    max_length = max(of_documents.shape[2], length)
    rows = tokens + torch.arange(1, count + 1, device=ends.device, dtype=ends.dtype) * length
    if len(attended) == count * length:
        call["attention_mask"] = packed_mask(torch.cat([of_documents[0, 0, -1], rows]), max_length)
    else:
        # The masked rows of a query are the keys of an empty text behind it.
        keys = torch.stack([rows - length + ends.diff(), rows], dim=1).reshape(-1)
        call["attention_mask"] = packed_mask(
            torch.cat([of_documents[0, 0, -1], rows.repeat_interleave(2)]),
            max_length,
            torch.cat([of_documents[0, 0, -1], keys]),
            core.query_length,
        )
    return call
