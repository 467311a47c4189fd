"""Digests that tell whether an index is that of a model and of a corpus."""

from __future__ import annotations

import hashlib
import json

import torch
from datasets import Dataset
from sentence_transformers import SparseEncoder
from torch import Tensor

from pylate_fastmaxsim.recipes.evaluation.beir import IDS_AT_ONCE, document_texts
from pylate_fastmaxsim.recipes.models.retriever import TextRetriever, is_multi_vector
from pylate_fastmaxsim.retrieval.static.model import StaticLateInteraction

# What PyLate does to documents beside the modules.
LATE_SETTINGS = ("document_length", "document_prefix", "skiplist_words")
SPARSE_SETTINGS = ("max_active_dims",)
# SpladePooling knows its size after the first text only.
FOUND_OUT = "word_embedding_dimension"


def corpus_digest(corpus: Dataset) -> str:
    """The same for the same ids, titles and texts in the same order."""
    digest = hashlib.blake2b(digest_size=16)
    for rows in corpus.iter(IDS_AT_ONCE):
        digest.update(json.dumps([list(map(str, rows["_id"])), document_texts(rows)]).encode())
    return digest.hexdigest()


def model_digest(model: TextRetriever) -> str:
    """The same for the same weights and settings, by which documents are encoded."""
    if isinstance(model, StaticLateInteraction):
        return _static_digest(model)
    names = (*_own_settings(model), "prompts", "default_prompt_name", "max_seq_length")
    settings = {name: getattr(model, name) for name in names}
    modules = [(type(module).__name__, {**module.get_config_dict(), FOUND_OUT: None}) for module in model]
    digest = hashlib.blake2b(json.dumps([settings, modules], default=str).encode(), digest_size=16)
    _add_weights(digest, model.state_dict())
    return digest.hexdigest()


def _own_settings(model: TextRetriever) -> tuple[str, ...]:
    if isinstance(model, SparseEncoder):
        return SPARSE_SETTINGS
    return () if is_multi_vector(model) else LATE_SETTINGS  # the modules of a MultiVectorEncoder hold all of them


def _static_digest(model: StaticLateInteraction) -> str:
    tokenizer = getattr(model.tokenizer, "backend_tokenizer", model.tokenizer)
    mean_length = model.statistics.mean_length if model.bm25_weights and model.statistics else None
    settings = [model.threshold, model.neighbours, model.skiplist, model.bm25_weights, mean_length, tokenizer.to_str()]
    digest = hashlib.blake2b(json.dumps(settings, default=str).encode(), digest_size=16)
    _add_weights(digest, {"queries": model.query_vectors, "documents": model.document_vectors})
    return digest.hexdigest()


def _add_weights(digest: hashlib.blake2b, weights: dict[str, Tensor]) -> None:
    for name, weight in weights.items():
        digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}".encode())
        digest.update(weight.cpu().contiguous().flatten().view(torch.uint8).numpy().data)
