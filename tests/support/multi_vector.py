"""Losses of a tiny MultiVectorEncoder and their gradients, ours against stock."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support import compared
from tests.support.models import attend_to_own_document, sentences
from tests.support.ranks import loss_and_gradients

pytest.importorskip(
    "sentence_transformers.multi_vector_encoder", reason="no MultiVectorEncoder before Sentence Transformers 6"
)

from sentence_transformers import MultiVectorEncoder
from sentence_transformers.multi_vector_encoder import losses
from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask
from sentence_transformers.multi_vector_encoder.scoring import (
    XTRKDScores,
    XTRScores,
    mean_colbert_scores,
    xtr_scores_pairwise,
)

import pylate_fastmaxsim
from pylate_fastmaxsim.integrations.encoding import attention as encoding_attention
from pylate_fastmaxsim.integrations.encoding import modes as encoding_modes

COUNT = 8
QUERIES, POSITIVES, NEGATIVES = (sentences(COUNT, longest, seed) for longest, seed in ((6, 1), (20, 2), (20, 3)))
TEACHER = torch.linspace(-1, 1, 2 * COUNT).view(COUNT, 2)
LOSSES = [
    (losses.MultiVectorMultipleNegativesRankingLoss, {}),
    (losses.MultiVectorMultipleNegativesRankingLoss, {"mini_batch_size": 5, "score_mini_batch_size": 3, "scale": 2.0}),
    (losses.MultiVectorMultipleNegativesRankingLoss, {"similarity_fct": mean_colbert_scores, "scale": 8.0}),
    (losses.MultiVectorMultipleNegativesRankingLoss, {"similarity_fct": XTRScores(9)}),
    (losses.CachedMultiVectorMultipleNegativesRankingLoss, {"mini_batch_size": 3}),
    (losses.CachedMultiVectorMultipleNegativesRankingLoss, {"mini_batch_size": 8, "mini_batch_num_tokens": 60}),
    (losses.MultiVectorDistillKLDivLoss, {"temperature": 0.5}),
    (losses.MultiVectorMarginMSELoss, {}),
    (losses.CachedMultiVectorMultipleNegativesRankingLoss, {"mini_batch_size": 3, "similarity_fct": XTRScores(9)}),
    (losses.MultiVectorDistillKLDivLoss, {"similarity_fct": XTRKDScores(9)}),
    (losses.MultiVectorMarginMSELoss, {"similarity_fct": xtr_scores_pairwise}),
]


def load(path: str, **options: object) -> MultiVectorEncoder:
    torch.manual_seed(0)
    return MultiVectorEncoder(path, device="cpu", **options).double().train()


def batch_of(model: MultiVectorEncoder) -> list[dict]:
    tasks = ["query", "document", "document"]
    return [
        {**on_device(model.preprocess(texts, task=task), model.device), "task": task}
        for texts, task in zip((QUERIES, POSITIVES, NEGATIVES), tasks, strict=True)
    ]


def on_device(column: dict, device: torch.device) -> dict:
    return {key: value.to(device) if torch.is_tensor(value) else value for key, value in column.items()}


def run(model: MultiVectorEncoder, loss: nn.Module, bf16: bool = False) -> tuple[torch.Tensor, dict]:
    model.zero_grad(set_to_none=True)
    with torch.autocast(model.device.type, torch.bfloat16, enabled=bf16):
        value = loss(batch_of(model), TEACHER.to(model.device, copy=True))
    value.backward()
    return found(model, value)


def found(model: MultiVectorEncoder, value: torch.Tensor) -> tuple[torch.Tensor, dict]:
    """A loss that was differentiated, and the gradients that it left."""
    weights = model.named_parameters()
    return value.detach().double(), {name: weight.grad for name, weight in weights if weight.grad is not None}


# Scores are float32 in a model in float64 too.
assert_equal = partial(compared.assert_equal, tolerance=3e-6)


def assert_as_stock(model: MultiVectorEncoder, loss: nn.Module, **options: object) -> None:
    """Switch the package on, and compare a step with the one before."""
    stock = run(model, loss)
    pylate_fastmaxsim.enable(**options)
    assert_equal(run(model, loss), stock)


def modes(model: MultiVectorEncoder) -> set[str]:
    return set(encoding_modes.chosen.get(model[0], {}).values())


def of_ones_own(model: MultiVectorEncoder) -> nn.Module:
    model.__class__ = OfOnesOwn
    return model


class OfOnesOwn(MultiVectorEncoder):
    def forward(self, input: dict, task: str | None = None) -> dict:
        for module in self:
            input = module(input, **({"task": task} if isinstance(module, MultiVectorMask) else {}))
        return input


def batch_of_rank(model: MultiVectorEncoder) -> list[dict]:
    rank = dist.get_rank()
    # Rank 0 has short documents and rank 1 long ones: each alone would divide them differently.
    longest = (6, 40)[rank]
    texts = [sentences(6, longest=8, seed=rank), *(sentences(6, longest, seed=10 * n + rank) for n in (1, 2))]
    tasks = ["query", "document", "document"]
    return [{**model.preprocess(each, task=task), "task": task} for each, task in zip(texts, tasks, strict=True)]


def compare(
    loss_class,
    wrap: Callable,
    mode: str,
    packs: tuple[bool, bool] = (True, True),
    checkpointing: bool = False,
    compiled: bool = False,
    **options,
) -> Callable[[str], None]:
    """Loss and gradients of each rank are those of stock. On GPUs in bf16, which is packed, or in float32."""

    def run(folder: str) -> None:
        rank, on_gpu = dist.get_rank(), dist.get_backend() == "nccl"
        bf16 = on_gpu and mode == "packed"
        torch.manual_seed(0)
        core = MultiVectorEncoder(f"{folder}/modernbert", device=f"cuda:{rank}" if on_gpu else "cpu").train()
        core = core if on_gpu else core.double()
        if checkpointing:
            core[0].auto_model.gradient_checkpointing_enable({"use_reentrant": False})
        transformer = core[0]
        batch = [on_device(column, core.device) for column in batch_of_rank(core)]
        loss_function = loss_class(wrap(core), **options)

        def in_bf16(columns: list[dict]) -> torch.Tensor:
            with torch.autocast("cuda", dtype=torch.bfloat16, enabled=bf16):
                return loss_function(columns)

        stock = loss_and_gradients(core, loss_function, batch)
        step = partial(loss_and_gradients, core, in_bf16 if on_gpu else loss_function, batch)
        if packs[rank] and not on_gpu:
            encoding_attention.variable_length_attention = attend_to_own_document
        with pylate_fastmaxsim.enabled(compile=compiled):
            for _ in range(2):
                ours = step()
            found = set(encoding_modes.chosen.get(transformer, {}).values()) or {"padded"}
        assert found == {mode if packs[rank] else "grouped"}
        if not on_gpu:
            assert_equal(ours, stock)
            return
        assert ours[0] == pytest.approx(stock[0], rel=0.02 if bf16 else 2e-5)
        own, exact = (torch.cat([gradient.flatten() for gradient in each[1].values()]) for each in (ours, stock))
        # A winner that bf16 picks otherwise moves the few gradients here by a fifth, in stock too.
        assert (own - exact).norm() < (0.4 if bf16 else 1e-4) * exact.norm()

    return run
