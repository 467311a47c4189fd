"""The padded documents of a batch, and which of their tokens are attended to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pylate_fastmaxsim.integrations.encoding import token_counts
from pylate_fastmaxsim.integrations.encoding.masks import uninspected
from pylate_fastmaxsim.integrations.encoding.token_counts import known_total
from pylate_fastmaxsim.integrations.models.encoders import positions, takes_token_types


@dataclass(frozen=True)
class Documents:
    """Padded documents of all columns of a batch, one below the other.

    Parameters
    ----------
    input_ids, attention_mask
        ``[N, L]``.
    token_type_ids
        ``[N, L]``, or None where the tokenizer makes none.
    token_index
        Positions ``row * L + column`` of the attended tokens, ``[T]``, int64, ascending.
    cu_seqlens
        First attended token of each document in ``token_index`` and their number, ``[N + 1]``, int32.
    gaps
        Whether a document has a masked token before an attended one. Packing would make its two sides neighbours.
    """

    input_ids: Tensor
    attention_mask: Tensor
    token_type_ids: Tensor | None
    token_index: Tensor
    cu_seqlens: Tensor
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

        Raises
        ------
        ValueError
            On a GPU: the token counts of an earlier batch did not match its masks.
        """
        length = max(column["input_ids"].shape[1] for column in columns)
        attention_mask = _stack(columns, "attention_mask", length)
        token_index, cu_seqlens, left = attended_tokens(columns, attention_mask)
        has_types = any("token_type_ids" in column for column in columns)
        return cls(
            input_ids=_stack(columns, "input_ids", length),
            attention_mask=attention_mask,
            token_type_ids=_stack(columns, "token_type_ids", length) if has_types else None,
            token_index=token_index,
            cu_seqlens=cu_seqlens,
            gaps=not left and has_gaps(attention_mask),
        )


def attended_index(attention_mask: Tensor, total: int | None = None) -> tuple[Tensor, Tensor]:
    """Positions of the attended tokens of a padded batch, and where each row begins among them.

    Parameters
    ----------
    attention_mask
        ``[N, L]``, 0/1.
    total
        How many are attended to, T, if known; otherwise this waits for the device. With a wrong number the positions
        are wrong, but inside the batch.

    Returns
    -------
    tuple of Tensor
        Positions ``row * L + column``, ``[T]``, int64, and ``cu_seqlens``, ``[N + 1]``, int32.

    Examples
    --------
    >>> mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    >>> attended_index(mask)
    (tensor([0, 1, 3]), tensor([0, 2, 3], dtype=torch.int32))
    >>> attended_index(mask, total=3)
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
    """The same for tokenized columns, whose masks stand one below the other in ``attention_mask``.

    Returns also whether all columns had token counts, so that nothing waited for the device.

    Examples
    --------
    >>> mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    >>> column = {"input_ids": mask, "attention_mask": mask}
    >>> attended_tokens([column], mask)
    (tensor([0, 1, 3]), tensor([0, 2, 3], dtype=torch.int32), False)
    >>> attended_tokens([{**column, "token_total": token_counts.TokenCounts.of(mask)}], mask)[2]
    True
    """
    totals = [known_total(column) for column in columns]
    if None in totals:
        return *attended_index(attention_mask), False
    token_counts.verify_async(attention_mask, sum(totals))
    return *attended_index(attention_mask, sum(totals)), True


def rows_of(features: dict[str, object], begin: int, end: int) -> dict[str, object]:
    """Some texts of a column. Features that are not one value per text, such as a scalar or a name, are kept whole.

    Examples
    --------
    >>> rows_of({"input_ids": torch.tensor([[1], [2]]), "keys": ["a", "b"], "prompt_length": 3}, 1, 2)
    {'input_ids': tensor([[2]]), 'keys': ['b'], 'prompt_length': 3}
    """
    count = len(features["input_ids"])
    return {key: value[begin:end] if _has_rows(value, count) else value for key, value in features.items()}


def padded_again(states: Tensor, index: Tensor, count: int, width: int, filler: Tensor) -> Tensor:
    """States ``[T, d]`` at their places ``row * width + column``, ``[count, width, d]``, with ``filler`` as padding.

    Zeros would give NaN in a normalisation of the user's own that divides by the norm of every token.

    Examples
    --------
    >>> states = torch.tensor([[1.0], [2.0]])
    >>> padded_again(states, torch.tensor([0, 2]), count=2, width=2, filler=states[:1]).squeeze(-1)
    tensor([[1., 1.],
            [2., 1.]])
    """
    filled = filler.detach().repeat(count * width, 1)
    return filled.index_copy_(0, index, states).view(count, width, -1)


def counting(column: dict[str, Tensor], skipped: Callable[[Tensor], Tensor]) -> Tensor:
    """Which tokens of padded texts are scored, ``[N, L]``, bool: attended to and not skipped."""
    return column["attention_mask"].bool() & ~skipped(column["input_ids"])


def extents(attention_mask: Tensor) -> Tensor:
    """Columns up to and with the last attended one, ``[N]``, int64."""
    columns = torch.arange(1, attention_mask.shape[1] + 1, device=attention_mask.device)
    return (attention_mask.bool() * columns).amax(dim=1)


def has_gaps(attention_mask: Tensor) -> bool:
    """Whether a row of a mask ``[N, L]``, 0/1, has a 0 before a 1. Waits for the device.

    Examples
    --------
    >>> has_gaps(torch.tensor([[1, 1, 0]])), has_gaps(torch.tensor([[1, 0, 1]]))
    (False, True)
    """
    attended = attention_mask != 0
    return bool((attended[:, 1:] & ~attended[:, :-1]).any())


def column_has_gaps(column: dict[str, Tensor]) -> bool:
    """The same for a tokenized column. Waits for the device if it has no token counts."""
    return known_total(column) is None and has_gaps(column["attention_mask"])


def _has_rows(value: object, count: int) -> bool:
    if isinstance(value, Tensor):
        return value.shape[:1] == (count,)
    return isinstance(value, list) and len(value) == count


def _stack(columns: Sequence[dict[str, Tensor]], key: str, length: int) -> Tensor:
    # Token types may be missing in a column. Encoders take 0 for them.
    parts = [column[key] if key in column else torch.zeros_like(column["input_ids"]) for column in columns]
    parts = [F.pad(part, (0, length - part.shape[1])) for part in parts]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def token_embeddings(model: nn.Module, features: dict[str, Tensor]) -> Tensor:
    """Token embeddings ``[N, L, d]`` of one call of the model. ``features`` is not changed."""
    with uninspected():
        return model(dict(features))["token_embeddings"]


def positioned(core: nn.Module, documents: Documents) -> tuple[Documents, Tensor]:
    """The documents, and positions ``[N, L]`` of their tokens.

    Documents get token types as well, if the encoder has any: what it would make up from the shape of its input would
    be wrong for packed documents.
    """
    if documents.token_type_ids is None and takes_token_types(core):
        documents = replace(documents, token_type_ids=torch.zeros_like(documents.input_ids))
    return documents, positions(core, documents.input_ids)
