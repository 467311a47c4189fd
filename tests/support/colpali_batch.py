"""Batches of vectors as colpali-engine's models give them to a loss, and its loss with the gradients of the vectors."""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import functional as F

IN_BATCH = ("ColbertLoss", "ColbertPairwiseCELoss", "ColbertSigmoidLoss")
WITH_NEGATIVES = ("ColbertNegativeCELoss", "ColbertPairwiseNegativeCELoss")


def unit(*shape: int, seed: int) -> Tensor:
    noise = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return F.normalize(noise + 1, dim=-1)


def padding(count: int, length: int, side: str, seed: int) -> Tensor:
    dead = torch.randint(1, length - 1, (count,), generator=torch.Generator().manual_seed(seed))
    dead[0] = 0
    live = torch.arange(length) >= dead[:, None]
    if side == "right":
        live = live.flip(1)
    if side == "between":
        live = torch.rand(count, length, generator=torch.Generator().manual_seed(seed)) < 0.6
        live[0], live[:, 0] = True, True
    return live.float()[..., None]


class Batch:
    """What a model gives for a batch: unit vectors, and zeros where the input was padded."""

    def __init__(self, side: str, extra_documents: int = 0, queries: int = 4, ways: int = 3, d: int = 16) -> None:
        documents = queries + extra_documents
        self.leaves = [unit(queries, 6, d, seed=0), unit(documents, 11, d, seed=1), unit(queries, ways, 9, d, seed=2)]
        # Every third is the other way round, so that its best token is a row of zeros where it has one.
        self.leaves[1][::3] *= -1
        self.leaves[2][:, ::3] *= -1
        self.masks = [
            padding(queries, 6, side, seed=3),
            padding(documents, 11, side, seed=4),
            padding(queries * ways, 9, side, seed=5).view(queries, ways, 9, 1),
        ]

    def run(self, loss: torch.nn.Module, offset: int) -> tuple[Tensor, list[Tensor]]:
        """The loss and the gradients of the vectors before a model multiplies them by its mask."""
        leaves = [leaf.clone().requires_grad_() for leaf in self.leaves]
        inputs = [leaf * mask for leaf, mask in zip(leaves, self.masks, strict=True)]
        used = 3 if hasattr(loss, "in_batch_term_weight") else 2
        names = ("query_embeddings", "doc_embeddings", "neg_doc_embeddings")
        value = loss(**dict(zip(names[:used], inputs[:used], strict=True)), offset=offset)
        value.backward()
        return value.detach(), [leaf.grad for leaf in leaves[:used]]


def assert_close(ours: tuple[Tensor, Iterable[Tensor]], stock: tuple[Tensor, Iterable[Tensor]]) -> None:
    assert any(theirs.abs().max() > 0 for theirs in stock[1])
    torch.testing.assert_close(ours[0], stock[0], rtol=1e-5, atol=0)
    for mine, theirs in zip(ours[1], stock[1], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5 * float(theirs.abs().max()))
