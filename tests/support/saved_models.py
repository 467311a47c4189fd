"""Tiny models of each kind that commands search with, and their scores by the host."""

from pathlib import Path
from typing import Any

import torch
from sentence_transformers import SparseEncoder

from pylate_fastmaxsim import StaticLateInteraction, TokenBatch, reference
from pylate_fastmaxsim.recipes.config.kinds import MODELS
from pylate_fastmaxsim.recipes.models.load import load_model
from tests.support.models import load_model as load_colbert
from tests.support.recipe_kinds import LATE as HOST
from tests.support.sparse_encoders import build_sparse_encoder
from tests.support.static_cases import save_static

LATE, SPARSE, STATIC = RETRIEVERS = ("late interaction", "sparse", "static late interaction")  # as reports have them


def save_retriever(kind: str, folder: Path, encoder: str, **options: Any) -> str:
    """Save a model with the tokenizer, or the weights, of an encoder; the name to load it by."""
    if kind == SPARSE:
        return build_sparse_encoder(folder, encoder, **options)
    if kind == STATIC:
        save_static(folder, encoder, **options)
    elif HOST == "multi_vector":
        keys = {"name_or_path": encoder, "embedding_size": 16, "document_length": 32, **options}
        model = load_model(MODELS["multi_vector"](**keys), "cpu", seed=0)
        model.prompts = {"query": "[Q] ", "document": "[D] "}
        model.save_pretrained(str(folder))
    else:
        load_colbert(encoder, **options).save_pretrained(str(folder))
    return str(folder)


def embeddings(model: Any, texts: list[str], is_query: bool) -> list[torch.Tensor]:
    if HOST == "multi_vector":
        return list(map(torch.as_tensor, (model.encode_query if is_query else model.encode_document)(texts)))
    return model.encode(texts, is_query=is_query, convert_to_tensor=True)


def host_scores(model: Any, queries: list[str], documents: list[str]) -> torch.Tensor:
    if isinstance(model, StaticLateInteraction):
        tables = (model.query_vectors.double(), model.document_vectors.double())
        left_out = model.skiplist, model.vocabulary
        ids = [
            [model.token_ids([each]).without(*left_out).ids.long() for each in side] for side in (queries, documents)
        ]
        sides = [[table[each] for each in side] for table, side in zip(tables, ids, strict=True)]
    elif isinstance(model, SparseEncoder) or HOST == "multi_vector":
        scores = model.similarity(model.encode_query(queries), model.encode_document(documents))
        return scores.to_dense() if scores.is_sparse else scores
    else:
        sides = [embeddings(model, texts, is_query) for texts, is_query in ((queries, True), (documents, False))]
    return reference.maxsim(*map(TokenBatch.from_list, sides))
