"""A MultiVectorEncoder on a GPU: with its own attention, kernels and compiler."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from multi_vector import modes, run
from sentence_transformers import MultiVectorEncoder
from sentence_transformers.multi_vector_encoder import losses, scoring

import pylate_fastmaxsim

pytestmark = pytest.mark.cuda


def distance(ours: list[torch.Tensor], exact: list[torch.Tensor]) -> float:
    """Of all gradients, relative to their length."""
    own, other = (torch.cat([gradient.flatten().float() for gradient in each[1:]]) for each in (ours, exact))
    return ((own - other).norm() / other.norm()).item()


CONTRASTIVE = losses.MultiVectorMultipleNegativesRankingLoss
CACHED = partial(losses.CachedMultiVectorMultipleNegativesRankingLoss, mini_batch_size=3)


@pytest.mark.parametrize(
    ("family", "compiled", "loss_class"),
    [
        ("modernbert", False, CACHED),
        ("modernbert", True, CONTRASTIVE),
        ("bert", True, CACHED),
        ("qwen3", False, CONTRASTIVE),
    ],
)
def test_packed_in_bf16(encoder, family, compiled, loss_class):
    torch.manual_seed(0)
    model = MultiVectorEncoder(encoder(family), device="cuda").train()
    loss = loss_class(model)
    exact = run(model, loss)
    pylate_fastmaxsim.enable(compile=compiled)
    ours = run(model, loss, bf16=True)
    assert modes(model) == {"packed"}
    torch.testing.assert_close(ours[0], exact[0], rtol=0.02, atol=0.02)
    # A winner that bf16 picks otherwise moves the few gradients here by a fifth, in stock too.
    assert distance(ours, exact) < 0.4


@pytest.mark.parametrize("metric", [scoring.XTRScores, scoring.XTRKDScores])
@pytest.mark.parametrize("top_k", [4, 10_000])
def test_xtr_scores(metric, top_k):
    """In float32, where both compute the same similarities; one of 10,000 passes whatever its sign."""
    torch.manual_seed(0)
    queries, documents = torch.randn(16, 32, 128, device="cuda"), torch.randn(16, 4, 100, 128, device="cuda")
    queries, documents = (torch.nn.functional.normalize(each, dim=-1).requires_grad_() for each in (queries, documents))
    masks = torch.rand(16, 32, device="cuda") < 0.9, torch.rand(16, 4, 100, device="cuda") < 0.8
    masks[1][3, 1] = False
    weights = None
    found = []
    for enabled in (False, True):
        if enabled:
            pylate_fastmaxsim.enable()
        scores = metric(top_k)(queries, documents, *masks)
        weights = torch.randn_like(scores) if weights is None else weights
        found.append([scores.detach(), *torch.autograd.grad((scores * weights).sum(), (queries, documents))])
    for ours, stock in zip(*reversed(found), strict=True):
        torch.testing.assert_close(ours, stock, rtol=1e-4, atol=1e-5 * stock[stock > -1e3].abs().max().item())
