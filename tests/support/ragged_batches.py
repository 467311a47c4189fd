"""Small ragged batches, with unused rows and masked tokens of NaN."""

import torch

from pylate_fastmaxsim import TokenBatch


def ragged(
    generator: torch.Generator,
    lengths: list[int],
    dim: int,
    dtype: torch.dtype = torch.float32,
    integers: bool = False,
    masked: bool = False,
    gapless: bool = False,
) -> TokenBatch:
    """Sequences in shuffled order with unused rows between them; every row that does not count is NaN."""
    # Products and sums of small integers are exact in any dtype, and ties abound. Other vectors have a length of about 1.
    starts, row = torch.zeros(len(lengths), dtype=torch.int64), 0 if gapless else 1
    for i in torch.randperm(len(lengths), generator=generator).tolist():
        starts[i] = row
        row += lengths[i] + (0 if gapless else int(torch.randint(0, 3, (), generator=generator)))
    if integers:
        values = torch.randint(-2, 3, (row, dim), generator=generator).to(dtype)
    else:
        values = (torch.randn(row, dim, generator=generator) * max(1, dim) ** -0.5).to(dtype)
    keep = torch.rand(row, generator=generator) < 0.6 if masked else torch.ones(row, dtype=torch.bool)
    used = torch.zeros(row, dtype=torch.bool)
    for start, length in zip(starts.tolist(), lengths, strict=True):
        used[start : start + length] = True
    values[~(used & keep)] = torch.nan
    slack = int(torch.randint(0, 4, (), generator=generator))
    longest, lengths = max(lengths, default=0) + slack, torch.tensor(lengths, dtype=torch.int64)
    return TokenBatch(values, starts, lengths, longest, keep if masked else None, gapless)


def batches(dtype=torch.float32, dim=16, queries=(5, 5, 3, 0, 5), documents=(7, 0, 20, 3, 9, 1), masked=True, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return tuple(ragged(generator, list(lengths), dim, dtype, masked=masked) for lengths in (queries, documents))
