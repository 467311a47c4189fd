"""Postings of a block of documents: what the scan of `search.cu` walks, made from the exact rows on their device."""

from dataclasses import dataclass

import torch
from torch import Tensor

# Documents of a block, whose sums lie in the shared memory of a multiprocessor (64 KiB; three blocks fit on an H100).
DOCUMENTS_PER_BLOCK = 16384
# Postings that a thread loads at once. Lists are filled up to a multiple of it.
UNIT = 8
LANES = 32
LARGEST_IMPACT = 255


@dataclass(frozen=True, eq=False)
class Postings:
    """Inverted lists of a block. The list of a term is the units ``starts[term]`` to ``starts[term + 1] - 1``.

    A weight lies between ``(impact - 1) * scale`` and ``impact * scale`` of its term, so that sums of impacts bound inner
    products from above. An impact is at least 1 where a document has the term, and 0 where a list is filled up.
    """

    ids: Tensor  # [units * 8] uint16, documents counted from the first of the block
    impacts: Tensor  # [units * 8] uint8
    starts: Tensor  # [V + 1] int32
    scales: Tensor  # [V] float32

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.ids, self.impacts, self.starts, self.scales))


def make_postings(offsets: Tensor, terms: Tensor, weights: Tensor, vocabulary: int) -> Postings:
    """Postings of up to ``DOCUMENTS_PER_BLOCK`` documents, over ``vocabulary`` terms.

    Rows lie back to back: ``offsets [n + 1]`` int64, ``terms [P]`` int32 or uint16, positive ``weights [P]`` float32 or float16.
    """
    device = offsets.device
    documents = offsets.numel() - 1
    local = torch.arange(documents, dtype=torch.int32, device=device)
    local = local.repeat_interleave(offsets.diff(), output_size=terms.numel())
    order = _order(terms, local, vocabulary)
    terms, local, weights = terms.int()[order], local[order], weights.float()[order]

    # The next float32 above, so that no weight exceeds 255 scales.
    scales = torch.zeros(vocabulary, device=device).scatter_reduce_(0, terms.long(), weights, "amax")
    scales = torch.nextafter(scales / LARGEST_IMPACT, torch.full_like(scales, torch.inf))
    impacts = (weights.double() / scales[terms].double()).ceil_().clamp_(1, LARGEST_IMPACT)

    begins = torch.searchsorted(terms, torch.arange(vocabulary + 1, dtype=torch.int32, device=device))
    units = (begins.diff() + UNIT - 1) // UNIT
    starts = torch.cat([units.new_zeros(1), units.cumsum(0)])
    total = int(starts[-1])
    # Within 32 units the lanes of a warp take turns: posting i stands in unit i % 32, so that at each step lanes add to
    # neighbours in the list.
    rank = torch.arange(terms.numel(), device=device) - begins[terms]
    group = rank // (LANES * UNIT)
    inside = rank - group * (LANES * UNIT)
    lanes = (units[terms] - group * LANES).clamp_(max=LANES)
    unit = starts[terms] + group * LANES + inside % lanes
    place = unit * UNIT + inside // lanes

    # What fills up adds 0, to places that differ from unit to unit, so that lanes do not wait for one another.
    filler = torch.arange(total * UNIT, dtype=torch.int32, device=device)
    filler = (filler // UNIT + 37 * (filler % UNIT)) % DOCUMENTS_PER_BLOCK
    ids = filler.to(torch.int16)
    ids[place] = local.to(torch.int16)
    values = torch.zeros(total * UNIT, dtype=torch.uint8, device=device)
    values[place] = impacts.to(torch.uint8)
    return Postings(ids.view(torch.uint16), values, starts.int(), scales)


def _order(terms: Tensor, local: Tensor, vocabulary: int) -> Tensor:
    """By term, and within a term such that 32 postings in a row mostly lie in 32 banks of shared memory.

    A document's bank is its number modulo 32. First come the first documents of all banks, then the second ones.
    """
    key = terms.long() * LANES + local % LANES
    key, order = key.sort(stable=True)
    number = torch.arange(key.numel(), device=key.device)
    first = torch.ones_like(key, dtype=torch.bool)
    first[1:] = key[1:] != key[:-1]
    rank = number - torch.where(first, number, 0).cummax(0).values
    key = (key // LANES * (DOCUMENTS_PER_BLOCK // LANES) + rank) * LANES + key % LANES
    return order[key.argsort()]
