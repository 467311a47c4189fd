"""A tiny SparseEncoder with random weights, in the releases of Sentence Transformers that have one."""

from __future__ import annotations

import torch
from sentence_transformers import SparseEncoder

try:
    from sentence_transformers.sparse_encoder.modules import MLMTransformer, SpladePooling
except ImportError:
    from sentence_transformers.sparse_encoder.models import MLMTransformer, SpladePooling


def load_sparse(path: str, max_active_dims: int = 8) -> SparseEncoder:
    """``path``: of a tiny BERT. With 8 terms a text most pairs of a query and a document share none."""
    torch.manual_seed(0)
    modules = [MLMTransformer(path), SpladePooling()]
    return SparseEncoder(modules=modules, device="cpu", max_active_dims=max_active_dims)
