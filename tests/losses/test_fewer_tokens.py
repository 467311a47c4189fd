"""Fewer tokens of each document, against loops."""

import pytest
import torch
from torch.nn import functional as F

from pylate_fastmaxsim import TokenBatch
from pylate_fastmaxsim.losses.views import pooled_tokens


def batch_and_tokens() -> tuple[TokenBatch, list[torch.Tensor]]:
    """Documents in another order than they are stored in, with gaps, and the live tokens of each."""
    torch.manual_seed(0)
    values = torch.randn(5, 7, 4, dtype=torch.float64, requires_grad=True)
    mask = torch.rand(5, 7) < 0.6
    mask[1] = True
    mask[3] = False
    order = torch.tensor([4, 0, 3, 1, 2])
    return TokenBatch.from_padded(values, mask).select(order), [values[i][mask[i]] for i in order.tolist()]


def tokens_of(batch: TokenBatch) -> list[torch.Tensor]:
    values, mask = batch.to_padded()
    return [rows[live] for rows, live in zip(values, mask, strict=True)]


@pytest.mark.parametrize("count", [1, 3, 7, 20])
def test_pooled(count):
    batch, tokens = batch_and_tokens()
    expected = []
    for each in tokens:
        size = max(len(each), count)
        # Run r begins where the place times the number of runs reaches r times the number of tokens.
        run = [place * count // size if len(each) > count else place for place in range(len(each))]
        means = [each[[r == wanted for r in run]].mean(0) for wanted in sorted(set(run))]
        expected.append(F.normalize(torch.stack(means), dim=-1) if means else each)
    found = pooled_tokens(batch, count)
    torch.testing.assert_close(tokens_of(found), expected)
    assert found.lengths.tolist() == [min(count, len(each)) for each in tokens]


def test_a_token_that_does_not_count_changes_nothing():
    batch, tokens = batch_and_tokens()
    values = batch.values.detach().masked_fill(~batch.keep[:, None], torch.nan).requires_grad_()
    pooled_tokens(batch.with_values(values), 2).values.sum().backward()
    assert values.grad.isfinite().all()
