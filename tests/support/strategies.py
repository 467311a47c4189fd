"""Hypothesis strategies for ragged batches of every awkward shape, shared by the tests of all paths."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from pylate_fastmaxsim import TokenBatch
from tests.support.ragged_batches import ragged

DIMS = (1, 7, 48, 96, 128, 200, 768, 1024)
LENGTHS = (0, 1, 2, 3, 5, 8, 17, 33)
LONG_LENGTHS = (100, 255, 256, 700, 2000)


@dataclass
class Problem:
    """Arguments of one call of ``maxsim``."""

    queries: TokenBatch
    documents: TokenBatch
    candidates: Tensor | None
    zero_floor: Tensor | None

    def values(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Differentiable copies of the two value matrices."""
        return tuple(batch.values.to(dtype, copy=True).requires_grad_() for batch in (self.queries, self.documents))


@st.composite
def problems(draw, dtypes: tuple[torch.dtype, ...], integers: bool, max_sequences: int = 5) -> Problem:
    """One call of ``maxsim``: any d, any lengths, masks, candidate lists and floors, seeded by hypothesis."""
    dim = draw(st.sampled_from(DIMS))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    lengths = st.sampled_from(LENGTHS[:6] if dim > 200 else LENGTHS)
    query_lengths = draw(st.lists(lengths, max_size=max_sequences))
    document_lengths = draw(st.lists(lengths, max_size=max_sequences))
    if dim <= 128 and document_lengths and draw(st.integers(0, 5)) == 0:
        document_lengths[0] = draw(st.sampled_from(LONG_LENGTHS))
    dtype = draw(st.sampled_from(dtypes))
    queries = ragged(generator, query_lengths, dim, dtype, integers, draw(st.booleans()))
    documents = ragged(generator, document_lengths, dim, dtype, integers, draw(st.booleans()))
    candidates = zero_floor = None
    if document_lengths and draw(st.booleans()):
        shape = (len(query_lengths), draw(st.integers(0, 4)))
        candidates = torch.randint(0, len(document_lengths), shape, generator=generator)
    if draw(st.booleans()):
        zero_floor = torch.rand(len(document_lengths), generator=generator) < 0.5
    return Problem(queries, documents, candidates, zero_floor)
