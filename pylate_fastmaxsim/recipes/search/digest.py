"""Digests that tell whether an index is that of a model and of a corpus."""

from __future__ import annotations

import hashlib
import json

import torch
from datasets import Dataset
from sentence_transformers import SparseEncoder
from torch import Tensor

from pylate_fastmaxsim.recipes.evaluation.beir import IDS_AT_ONCE, document_texts, is_of_pages
from pylate_fastmaxsim.recipes.models.retriever import TextRetriever, VisualRetriever, is_multi_vector
from pylate_fastmaxsim.retrieval.static.model import StaticLateInteraction

# What PyLate does to documents beside the modules.
LATE_SETTINGS = ("document_length", "document_prefix", "skiplist_words")
SPARSE_SETTINGS = ("max_active_dims",)
# SpladePooling knows its size after the first text only.
FOUND_OUT = "word_embedding_dimension"


def corpus_digest(corpus: Dataset) -> str:
    """The same for the same ids, titles and texts in the same order. Pages have their content as their id."""
    digest = hashlib.blake2b(digest_size=16)
    pages = is_of_pages(corpus)
    for rows in (corpus.select_columns("_id") if pages else corpus).iter(IDS_AT_ONCE):
        digest.update(json.dumps([list(map(str, rows["_id"])), [] if pages else document_texts(rows)]).encode())
    return digest.hexdigest()


def model_digest(model: TextRetriever) -> str:
    """The same for the same weights and settings, by which documents are encoded."""
    if isinstance(model, StaticLateInteraction):
        return _static_digest(model)
    if isinstance(model, VisualRetriever):
        settings = [type(model.model).__name__, model.processor.to_dict(), str(model.model.dtype)]
        settings.append(_tokenizer(getattr(model.processor, "tokenizer", None)))
        return _digest(settings, model.model.state_dict())
    names = (*_own_settings(model), "prompts", "default_prompt_name", "max_seq_length")
    settings = {name: getattr(model, name) for name in names}
    modules = [(type(module).__name__, {**module.get_config_dict(), FOUND_OUT: None}) for module in model]
    return _digest([settings, modules, _tokenizers(model)], model.state_dict())


def _tokenizers(model: TextRetriever) -> list:
    """What the tokenizers of a model's modules make of a text."""
    tokenizers = [getattr(module, "tokenizer", None) for module in model]
    return [_tokenizer(tokenizer) for tokenizer in tokenizers if tokenizer is not None]


def _tokenizer(tokenizer: object) -> object:
    fast = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if hasattr(fast, "to_str"):
        rules = json.loads(fast.to_str())
        # Of the last call, and set anew by each.
        return {**rules, "truncation": None, "padding": None}
    return getattr(tokenizer, "get_vocab", dict)()


def _own_settings(model: TextRetriever) -> tuple[str, ...]:
    if isinstance(model, SparseEncoder):
        return SPARSE_SETTINGS
    return () if is_multi_vector(model) else LATE_SETTINGS  # the modules of a MultiVectorEncoder hold all of them


def _static_digest(model: StaticLateInteraction) -> str:
    tokenizer = getattr(model.tokenizer, "backend_tokenizer", model.tokenizer)
    mean_length = model.statistics.mean_length if model.bm25_weights and model.statistics else None
    settings = [model.threshold, model.neighbours, model.skiplist, model.bm25_weights, mean_length, tokenizer.to_str()]
    return _digest(settings, {"queries": model.query_vectors, "documents": model.document_vectors})


def _digest(settings: list, weights: dict[str, Tensor]) -> str:
    digest = hashlib.blake2b(json.dumps(settings, default=str).encode(), digest_size=16)
    for name, weight in weights.items():
        digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}".encode())
        digest.update(weight.cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
