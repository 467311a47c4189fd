"""The padded documents of a batch, and which of their tokens are attended to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from pylate_fastmaxsim.integrations.encoding.token_counts import has_gaps, known_total, verify_async


@dataclass(frozen=True)
class Documents:
    """Padded documents of all columns of a batch, one below the other."""

    # [N, L]; token types where the tokenizer makes them.
    input_ids: Tensor
    attention_mask: Tensor
    token_type_ids: Tensor | None
    # Positions row * L + column of the attended tokens, [T], int64, ascending.
    token_index: Tensor
    # First attended token of each document in token_index and their number, [N + 1], int32.
    cu_seqlens: Tensor
    # Whether a document has a masked token before an attended one. Packing would make its two sides neighbours.
    gaps: bool = False

    def __len__(self) -> int:
        return self.input_ids.shape[0]

    @property
    def max_length(self) -> int:
        """Length L that the documents are padded to."""
        return self.input_ids.shape[1]

    @property
    def column(self) -> dict[str, Tensor]:
        """The documents as a tokenizer makes them."""
        types = {} if self.token_type_ids is None else {"token_type_ids": self.token_type_ids}
        return {"input_ids": self.input_ids, "attention_mask": self.attention_mask, **types}

    @classmethod
    def from_columns(cls, columns: Sequence[dict[str, Tensor]]) -> Documents:
        """Put the tokenized columns of a batch below each other. Waits for the GPU if a column has no token counts.

        On a GPU it raises ValueError if token counts of an earlier batch did not match its masks.
        """
        attention_mask = _stack(columns, "attention_mask")
        token_index, cu_seqlens, counted = attended_tokens(columns, attention_mask)
        has_types = any("token_type_ids" in column for column in columns)
        return cls(
            input_ids=_stack(columns, "input_ids"),
            attention_mask=attention_mask,
            token_type_ids=_stack(columns, "token_type_ids") if has_types else None,
            token_index=token_index,
            cu_seqlens=cu_seqlens,
            gaps=not counted and has_gaps(attention_mask),
        )


def attended_index(attention_mask: Tensor, total: int | None = None) -> tuple[Tensor, Tensor]:
    """Positions ``row * L + column`` of the attended tokens of a mask ``[N, L]``, 0/1, int64, and their ``cu_seqlens``.

    Waits for the device if the ``total`` is not known. With a wrong one positions are wrong, but inside the batch.

    Examples
    --------
    >>> attended_index(torch.tensor([[1, 1, 0], [1, 0, 0]]), total=3)
    (tensor([0, 1, 3]), tensor([0, 2, 3], dtype=torch.int32))
    """
    attended = attention_mask != 0
    cu_seqlens = F.pad(attended.sum(dim=1).cumsum(0), (1, 0)).int()
    attended = attended.reshape(-1)
    if total is None:
        return attended.nonzero().squeeze(1), cu_seqlens
    # The k-th attended token is where the running count first reaches k.
    place = torch.arange(1, total + 1, device=attended.device)
    token_index = torch.searchsorted(attended.cumsum(0), place)
    return token_index.clamp_(max=max(len(attended) - 1, 0)), cu_seqlens.clamp_(max=total)


def attended_tokens(columns: Sequence[dict[str, Tensor]], attention_mask: Tensor) -> tuple[Tensor, Tensor, bool]:
    """Find the attended tokens of columns, whose masks stand one below the other in ``attention_mask``.

    Returns also whether all columns had token counts, so that nothing waited for the device.
    """
    totals = [known_total(column) for column in columns]
    if None in totals:
        return *attended_index(attention_mask), False
    verify_async(attention_mask, sum(totals))
    return *attended_index(attention_mask, sum(totals)), True


def padded_again(states: Tensor, index: Tensor, count: int, width: int, filler: Tensor) -> Tensor:
    """Put states ``[T, d]`` at places ``row * width + column`` of ``[count, width, d]``, with ``filler`` as padding.

    Zeros would give NaN in a normalisation of the user's own that divides by the norm of every token.
    """
    filled = filler.detach().repeat(count * width, 1)
    return filled.index_copy_(0, index, states).view(count, width, -1)


def _stack(columns: Sequence[dict[str, Tensor]], key: str) -> Tensor:
    length = max(column["input_ids"].shape[1] for column in columns)
    # Token types may be missing in a column. Encoders take 0 for them.
    parts = [column[key] if key in column else torch.zeros_like(column["input_ids"]) for column in columns]
    parts = [F.pad(part, (0, length - part.shape[1])) for part in parts]
    return parts[0] if len(parts) == 1 else torch.cat(parts)
