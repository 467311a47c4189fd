"""Tiny SparseEncoders with random weights, in every release of Sentence Transformers that has them."""

from functools import partial
from pathlib import Path

import torch
from sentence_transformers import SparseEncoder
from transformers import AutoTokenizer, BertConfig, BertForMaskedLM

try:
    from sentence_transformers.base.modules import Router, Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling
    from sentence_transformers.sparse_encoder import modules as sparse

    masked_lm = partial(Transformer, transformer_task="fill-mask")
except ImportError:
    from sentence_transformers.models import Pooling, Router, Transformer
    from sentence_transformers.sparse_encoder import models as sparse

    masked_lm = sparse.MLMTransformer

SpladePooling = sparse.SpladePooling

# Of the heads that are known. ``encoder(family, masked_lm=True)`` is the folder of a tiny model of one.
FAMILIES = ("bert", "distilbert", "xlm-roberta", "modernbert")


def splade(path: str, **pooling: object) -> SparseEncoder:
    """A SPLADE model in training, in float64, of a folder with a masked language model."""
    return _sparse_encoder(masked_lm(path), SpladePooling(**pooling))


def inference_free(path: str) -> SparseEncoder:
    documents = [masked_lm(path), SpladePooling()]
    queries = [sparse.SparseStaticEmbedding(AutoTokenizer.from_pretrained(path))]
    return _sparse_encoder(Router.for_query_document(queries, documents, default_route="document"))


def autoencoder(path: str) -> SparseEncoder:
    """A CSR model: sparse by an autoencoder of dense embeddings, without a vocabulary."""
    encoder = Transformer(path)
    return _sparse_encoder(encoder, Pooling(32), sparse.SparseAutoEncoder(32, hidden_dim=64, k=8, k_aux=16))


def transformer_of(model: SparseEncoder) -> torch.nn.Module:
    return model[0].sub_modules["document"][0] if isinstance(model[0], Router) else model[0]


def _sparse_encoder(*modules: torch.nn.Module) -> SparseEncoder:
    torch.manual_seed(0)
    return SparseEncoder(modules=list(modules), device="cpu").double().train()


def load_sparse(path: str, max_active_dims: int | None = 8) -> SparseEncoder:
    """``path``: of a tiny BERT. With 8 terms a text most pairs of a query and a document share none."""
    torch.manual_seed(0)
    modules = [sparse.MLMTransformer(path), SpladePooling()]
    return SparseEncoder(modules=modules, device="cpu", max_active_dims=max_active_dims)


def build_sparse_encoder(folder: Path, tokenizer: str, seed: int = 0) -> str:
    """Save a SPLADE of one layer, with the tokenizer in another folder, for ``SparseEncoder(...)``."""
    pieces = AutoTokenizer.from_pretrained(tokenizer)
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    model = BertForMaskedLM(BertConfig(vocab_size=len(pieces), **sizes))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2:
                weight.normal_(std=0.3 if "embed" in name else weight.shape[1] ** -0.5)
        # A few terms of each token, as after training.
        model.cls.predictions.bias.fill_(-3.0)
    model.save_pretrained(folder / "mlm")
    pieces.save_pretrained(folder / "mlm")
    modules = [sparse.MLMTransformer(str(folder / "mlm")), SpladePooling()]
    SparseEncoder(modules=modules).save_pretrained(str(folder / "model"))
    return str(folder / "model")
