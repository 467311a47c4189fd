"""Scores and gradients against those of PyLate."""

import pytest
import torch
from pylate.scores import XTRKDScores, XTRScores, colbert_scores

from pylate_fastmaxsim import TokenBatch, maxsim, reference, xtr_scores


def unit(*shape: int, seed: int) -> torch.Tensor:
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.normalize(drawn, dim=-1)


def masks(count: int, length: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.arange(length) < torch.randint(1, length, (count, 1), generator=generator)
    mask &= torch.rand(count, length, generator=generator) < 0.9
    mask[0] = True
    return mask


def same(function, stock, *leaves: torch.Tensor, tolerance: float = 1e-5) -> None:
    results = []
    for each in (function, stock):
        inputs = [leaf.clone().requires_grad_() for leaf in leaves]
        scores = each(*inputs)
        weights = torch.randn(scores.shape, generator=torch.Generator().manual_seed(2)).to(scores)
        results.append((scores, *torch.autograd.grad((scores * weights).sum(), inputs)))
    for ours, wanted in zip(*results, strict=True):
        torch.testing.assert_close(ours, wanted, rtol=0, atol=tolerance * wanted.abs().max().item(), check_dtype=False)


@pytest.mark.parametrize("function", [xtr_scores, reference.xtr_scores])
@pytest.mark.parametrize("own, k, masked", [(False, 1, False), (False, 60, True), (True, 7, True), (True, 110, False)])
def test_xtr_scores_are_those_of_pylate(function, own, k, masked):
    q_mask, d_mask = (masks(5, 4, 2), masks(15, 16, 1)) if masked else (None, None)
    candidates = torch.arange(15).view(5, 3) if own else None
    floor = ~d_mask.all(dim=1) if masked else None

    def ours(queries, documents):
        batches = TokenBatch.from_padded(queries, q_mask), TokenBatch.from_padded(documents.flatten(0, 1), d_mask)
        return function(*batches, k, candidates, zero_floor=floor)

    def stock(queries, documents):
        metric = (XTRKDScores if own else XTRScores)(k=k)
        return metric(queries, documents, q_mask, d_mask.view(5, 3, 16) if masked else None)

    same(ours, stock, unit(5, 4, 8, seed=0), unit(5, 3, 16, 8, seed=1))


def test_all_tokens_pass_as_in_pylate_where_k_is_their_number():
    queries, documents = unit(3, 4, 2, seed=0), unit(3, 2, 2, 2, seed=1)
    stock = XTRScores(k=12)(queries, documents)
    assert (stock < 0).any(), "documents whose tokens are all negative must take part"
    for k in (12, 13, 1000):
        torch.testing.assert_close(xtr_scores(queries, documents.flatten(0, 1), k), stock)
    # NaN takes a place.
    documents[1, 0, 1] = torch.nan
    nan = xtr_scores(queries, documents.flatten(0, 1), 4)
    torch.testing.assert_close(nan, XTRScores(k=4)(queries, documents), equal_nan=True)
    documents[1, 0, 1] = 0
    # Where nothing is positive the sum is divided by PyLate's smallest count.
    nothing = -documents[:1].abs(), queries[:1].abs()
    torch.testing.assert_close(xtr_scores(nothing[1], nothing[0][0], 4), XTRScores(k=4)(nothing[1], nothing[0]))


def test_zero_floor_is_the_rule_of_stock_pylate():
    """PyLate multiplies similarities by the mask, so where a token is masked no maximum is below 0."""
    mask = torch.rand(6, 4, generator=torch.Generator().manual_seed(0)) < 0.7
    mask[0], mask[1] = True, False
    q_mask = masks(4, 5, 0)

    def ours(queries, documents, **options):
        return maxsim(queries, documents, queries_mask=q_mask, documents_mask=mask, **options)

    leaves = unit(4, 5, 2, seed=0).double(), unit(6, 4, 2, seed=1).double()
    stock = {"queries_mask": q_mask.double(), "documents_mask": mask.double()}
    same(lambda q, d: ours(q, d, zero_floor=~mask.all(dim=1)), lambda q, d: colbert_scores(q, d, **stock), *leaves)
    assert not torch.allclose(ours(*leaves), colbert_scores(*leaves, **stock))
