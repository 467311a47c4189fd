"""Losses of this package in the trainer that PyLate uses, with its collators."""

from __future__ import annotations

import pytest
import torch

import pylate_fastmaxsim
from pylate_fastmaxsim.losses import ContrastiveDistillation, Matryoshka
from tests.support.models import load_model
from tests.support.training_runs import candidates, train

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize("size", [{}, {"mini_batch_tokens": 200}], ids=str)
def test_loss_curves(encoder, packed, tmp_path, size):
    def curve() -> list[float]:
        torch.manual_seed(0)
        model = load_model(encoder("modernbert", local_attention=24))
        loss = ContrastiveDistillation(model, temperature=0.5, teacher_temperature=0.5, **size)
        loss = Matryoshka(model, loss, (16, 8), document_tokens=(None, 4))
        return train(model, loss, candidates(), tmp_path, eval_strategy="epoch")

    stock = curve()
    pylate_fastmaxsim.enable()
    assert curve() == pytest.approx(stock, rel=2e-3)
    assert stock[-1] < stock[0]
