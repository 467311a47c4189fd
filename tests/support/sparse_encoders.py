"""Tiny SparseEncoders with random weights, in every release of Sentence Transformers that has them."""

from __future__ import annotations

from pathlib import Path

import torch
from sentence_transformers import SparseEncoder
from transformers import AutoTokenizer, BertConfig, BertForMaskedLM

try:
    from sentence_transformers.sparse_encoder.modules import MLMTransformer, SpladePooling
except ImportError:
    from sentence_transformers.sparse_encoder.models import MLMTransformer, SpladePooling


def load_sparse(path: str, max_active_dims: int | None = 8) -> SparseEncoder:
    """``path``: of a tiny BERT. With 8 terms a text most pairs of a query and a document share none."""
    torch.manual_seed(0)
    modules = [MLMTransformer(path), SpladePooling()]
    return SparseEncoder(modules=modules, device="cpu", max_active_dims=max_active_dims)


def build_sparse_encoder(folder: Path, tokenizer: str, seed: int = 0) -> str:
    """Save a SPLADE of one layer, with the tokenizer in another folder, for ``SparseEncoder(...)``."""
    pieces = AutoTokenizer.from_pretrained(tokenizer)
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=len(pieces), hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    model = BertForMaskedLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2:
                weight.normal_(std=0.3 if "embed" in name else weight.shape[1] ** -0.5)
        # A few terms of each token, as after training.
        model.cls.predictions.bias.fill_(-3.0)
    model.save_pretrained(folder / "mlm")
    pieces.save_pretrained(folder / "mlm")
    SparseEncoder(modules=[MLMTransformer(str(folder / "mlm")), SpladePooling()]).save_pretrained(str(folder / "model"))
    return str(folder / "model")
