"""Losses of a tiny SPLADE model and their gradients, ours against stock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch
from sentence_transformers import SparseEncoder
from sentence_transformers.sparse_encoder import losses
from torch import Tensor, nn
from torch.nn import functional as F

import pylate_fastmaxsim
from pylate_fastmaxsim.integrations.encoding import modes as encoding_modes
from pylate_fastmaxsim.integrations.models.encoders import hidden_states_of
from tests.support import compared
from tests.support.models import sentences
from tests.support.sparse_encoders import transformer_of

pytest.importorskip("sentence_transformers", minversion="5.1", reason="no SPLADE by the flag before it")

COUNT = 6
TASKS = ("query", "document", "document", "document")
TEXTS = [sentences(COUNT, longest, seed) for longest, seed in ((6, 1), (20, 2), (20, 3), (30, 4))]
# Labels of pairs, of triplets and of several negatives.
SCORES = torch.linspace(1, 0, COUNT, dtype=torch.float64)
MARGINS = torch.linspace(-1, 1, COUNT, dtype=torch.float64)
TEACHER = torch.linspace(-1, 1, 3 * COUNT, dtype=torch.float64).view(COUNT, 3)

# Options of splade_loss() for GradCache; before release 5.3, which has none, those for a loss without it.
CACHED = {"kind": losses.CachedSpladeLoss, "mini_batch_size": 4} if hasattr(losses, "CachedSpladeLoss") else {}

assert_equal = partial(compared.assert_equal, tolerance=1e-9)


def batch_of(model: SparseEncoder, columns: int, texts: Sequence[list[str]] = TEXTS) -> list[dict]:
    """A tokenized batch, as the collator makes it."""
    tokenize = model.preprocess if hasattr(model, "preprocess") else model.tokenize
    columns = [tokenize(each, task=task) for each, task in zip(texts[:columns], TASKS, strict=False)]
    return [{key: value for key, value in column.items() if value is not None} for column in columns]


def splade_loss(model: SparseEncoder, base: type[nn.Module], kind: type[nn.Module] = losses.SpladeLoss, **options):
    """A loss with regularisers. Those of the base loss are in ``base``, a class or a partial of one."""
    weights = {"document_regularizer_weight": 3e-2}
    if not options.get("use_document_regularizer_only"):
        weights["query_regularizer_weight"] = 5e-2
    return kind(model, base(model), **{**weights, **options})


def run(model: SparseEncoder, loss: nn.Module, batch: list[dict], labels: Tensor | None = None, bf16: bool = False):
    """The loss and the gradients of all parameters that have one."""
    model.zero_grad(set_to_none=True)
    with torch.autocast(model.device.type, torch.bfloat16, enabled=bf16):
        value = loss([dict(column) for column in batch], labels)
        # As the trainer adds them up.
        value = sum(value.values()) if isinstance(value, dict) else value
    value.backward()
    weights = model.named_parameters()
    return value.detach(), {name: weight.grad.clone() for name, weight in weights if weight.grad is not None}


def error(found: tuple, exact: tuple) -> float:
    """Distance of all gradients from exact ones."""
    return sum((found[1][name] - gradient).norm() for name, gradient in exact[1].items()).item()


def modes(model: SparseEncoder) -> set[str]:
    """How its texts were encoded."""
    return set(encoding_modes.chosen.get(hidden_states_of(transformer_of(model)), {}).values())


@dataclass
class Decoded:
    """How many tokens the decoder of a masked language model was called with, call by call."""

    decoder: nn.Module
    tokens: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, model: SparseEncoder, monkeypatch) -> Decoded:
        seen, stock = cls(transformer_of(model).auto_model.get_output_embeddings()), F.linear

        # Not its forward, nor that of Linear: a model with code of the user's own is encoded with padding.
        def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            if weight is seen.decoder.weight:
                seen.tokens.append(input.shape[:-1].numel())
            return stock(input, weight, bias)

        monkeypatch.setattr(F, "linear", linear)
        return seen


def assert_as_stock(model: SparseEncoder, decoded: Decoded, steps: dict[str, tuple], **options: object) -> None:
    """Loss and gradients of steps are stock's, and their logits are not computed. The package stays on.

    A step is a loss, a batch and perhaps labels. It is made twice, because the first one checks the head by numbers.
    """
    stock = {name: run(model, *step) for name, step in steps.items()}
    assert decoded.tokens, "stock does not call this decoder"
    pylate_fastmaxsim.enable(**options)
    for name, step in steps.items():
        for _ in range(2):
            decoded.tokens.clear()
            assert_equal(run(model, *step), stock[name])
        assert not decoded.tokens, "the fast way was not taken"
