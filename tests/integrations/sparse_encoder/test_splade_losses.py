"""Every loss that trains a SPLADE model, against stock."""

from __future__ import annotations

from functools import partial

import torch
from sentence_transformers.sparse_encoder import losses
from torch import nn

import pylate_fastmaxsim
from tests.support.sparse_encoders import autoencoder, inference_free, splade
from tests.support.splade_steps import (
    CACHED,
    MARGINS,
    SCORES,
    TEACHER,
    Decoded,
    assert_as_stock,
    assert_equal,
    batch_of,
    run,
    splade_loss,
)

CONTRASTIVE = losses.SparseMultipleNegativesRankingLoss


class L1(nn.Module):
    def compute_loss_from_embeddings(self, embeddings: torch.Tensor) -> torch.Tensor:
        return embeddings.abs().sum(dim=1).mean()


def squared_error(similarities: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The default but for labels, which stock casts to float32, and similarities here are float64."""
    return nn.functional.mse_loss(similarities, labels.to(similarities))


# The base loss, its columns and labels, and what the loss with regularisers is given.
LOSSES = {
    "contrastive": (CONTRASTIVE, 2, None, {}),
    "several negatives": (partial(CONTRASTIVE, gather_across_devices=True), 4, None, {}),
    "thresholds": (CONTRASTIVE, 3, None, {"document_regularizer_threshold": 150, "query_regularizer_threshold": 80}),
    "all are documents": (CONTRASTIVE, 3, None, {"use_document_regularizer_only": True}),
    "L1": (CONTRASTIVE, 3, None, {"document_regularizer": L1(), "query_regularizer": L1()}),
    "margins": (losses.SparseMarginMSELoss, 3, MARGINS, {}),
    "margins of several": (losses.SparseMarginMSELoss, 4, TEACHER, {}),
    "distillation": (partial(losses.SparseDistillKLDivLoss, temperature=0.5), 4, TEACHER, {}),
    "triplets": (losses.SparseTripletLoss, 3, None, {}),
    "cosine": (partial(losses.SparseCosineSimilarityLoss, loss_fct=squared_error), 2, SCORES, {}),
    "CoSENT": (losses.SparseCoSENTLoss, 2, SCORES, {}),
    "AnglE": (losses.SparseAnglELoss, 2, SCORES, {}),
    "cached": (CONTRASTIVE, 3, None, CACHED),
    "cached distillation": (losses.SparseDistillKLDivLoss, 4, TEACHER, CACHED),
}


def test_losses(encoder, packed, monkeypatch):
    """All in one test: to switch the package on and off takes longer than their steps."""
    model = splade(encoder("modernbert", masked_lm=True))
    steps = {
        name: (splade_loss(model, base, **options), batch_of(model, columns), labels)
        for name, (base, columns, labels, options) in LOSSES.items()
    }
    queries, documents = batch_of(model, 2)
    with torch.no_grad():
        teacher = model(dict(queries))["sentence_embedding"].roll(1, dims=0)
    # It calls the model itself.
    steps["embeddings"] = losses.SparseMSELoss(model), [queries, documents], teacher
    assert_as_stock(model, Decoded.of(model, monkeypatch), steps)


def test_padding_that_is_kept(encoder, monkeypatch):
    model = splade(encoder("bert", masked_lm=True), activation_function="log1p_relu")
    steps = {"contrastive": (splade_loss(model, CONTRASTIVE), batch_of(model, 3))}
    assert_as_stock(model, Decoded.of(model, monkeypatch), steps, padding_free=False)


def test_queries_without_an_encoder(encoder, packed, monkeypatch):
    """Inference-free SPLADE: a Router sends queries to SparseStaticEmbedding."""
    model = inference_free(encoder("distilbert", masked_lm=True))
    steps = {
        "contrastive": (splade_loss(model, CONTRASTIVE, query_regularizer_weight=None), batch_of(model, 3)),
        "cached": (splade_loss(model, CONTRASTIVE, **CACHED), batch_of(model, 3)),
    }
    assert_as_stock(model, Decoded.of(model, monkeypatch), steps)


def test_an_autoencoder_is_left_alone(encoder, caplog):
    model = autoencoder(encoder("bert"))
    loss, batch = losses.CSRLoss(model, CONTRASTIVE(model)), batch_of(model, 3)
    stock = run(model, loss, batch)
    pylate_fastmaxsim.enable()
    assert_equal(run(model, loss, batch), stock)
    assert "logits" not in caplog.text and "padding" not in caplog.text
