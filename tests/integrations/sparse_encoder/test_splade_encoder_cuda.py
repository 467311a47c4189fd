"""SPLADE models on a GPU: packed in bf16, and texts that they encode."""

from __future__ import annotations

import pytest
import torch
from sentence_transformers import SparseEncoder
from sentence_transformers.sparse_encoder import losses

import pylate_fastmaxsim
from tests.support.sparse_encoders import splade
from tests.support.splade_steps import TEXTS, Decoded, batch_of, error, modes, run, splade_loss

pytestmark = pytest.mark.cuda


def on_gpu(path: str) -> SparseEncoder:
    return splade(path).float().to("cuda")


@pytest.mark.parametrize(
    ("family", "compiled"), [("bert", True), ("distilbert", False), ("xlm-roberta", False), ("modernbert", True)]
)
def test_packed_in_bf16(encoder, monkeypatch, family, compiled):
    model = on_gpu(encoder(family, masked_lm=True))
    loss = splade_loss(model, losses.SparseMultipleNegativesRankingLoss)
    columns = batch_of(model, 3)
    batch = [{key: value.to("cuda") if torch.is_tensor(value) else value for key, value in c.items()} for c in columns]
    exact, stock = run(model, loss, batch), run(model, loss, batch, bf16=True)
    decoded = Decoded.of(model, monkeypatch)
    pylate_fastmaxsim.enable(compile=compiled)
    for _ in range(2):
        decoded.tokens.clear()
        ours = run(model, loss, batch, bf16=True)
    assert modes(model) == {"packed"}
    assert not decoded.tokens
    assert ours[0].dtype == stock[0].dtype
    assert ours[0].item() == pytest.approx(exact[0].item(), rel=3e-2)
    # A winner that bf16 picks otherwise moves the few gradients here, in stock too.
    assert error(ours, exact) < 2 * error(stock, exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_encoded_texts(encoder, dtype):
    model = on_gpu(encoder("bert", masked_lm=True)).to(dtype)
    stock = model.encode(TEXTS[3], show_progress_bar=False)
    pylate_fastmaxsim.enable()
    ours = model.encode(TEXTS[3], show_progress_bar=False)
    assert (ours.layout, ours.dtype, ours.device) == (stock.layout, stock.dtype, stock.device)
    tolerance = 1e-4 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(ours.to_dense(), stock.to_dense(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("training", [True, False])
def test_dtypes_under_autocast_are_those_of_stock(encoder, training):
    """In training autocast takes logarithms in float32, in evaluation they are taken in place."""
    model = on_gpu(encoder("bert", masked_lm=True)).train(training)
    features = {key: value.to("cuda") for key, value in batch_of(model, 1)[0].items() if torch.is_tensor(value)}

    def dtype() -> torch.dtype:
        with torch.autocast("cuda", torch.bfloat16):
            return model(dict(features))["sentence_embedding"].dtype

    stock = dtype()
    pylate_fastmaxsim.enable()
    assert dtype() == stock == (torch.float32 if training else torch.bfloat16)
