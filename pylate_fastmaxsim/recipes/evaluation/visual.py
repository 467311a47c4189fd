"""Evaluation of models of pages: nDCG@10 of the rows that were held out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from typing import Any

import torch
from datasets import Dataset
from PIL import Image
from torch import Tensor, nn
from tqdm.auto import tqdm

from pylate_fastmaxsim.recipes.config.schema import Recipe
from pylate_fastmaxsim.recipes.evaluation.finite import require_finite
from pylate_fastmaxsim.recipes.evaluation.targets import RecipeData
from pylate_fastmaxsim.recipes.models.retriever import VisualRetriever

METRIC = "ndcg@10"
DEPTH = 10


def evaluate(recipe: Recipe, retriever: VisualRetriever, data: RecipeData) -> dict[str, float]:
    """nDCG@10 of the rows that were held out."""
    return evaluate_pages(retriever, data.held_out, recipe.evaluation.batch_size)


def names_of_metrics(recipe: Recipe, data: RecipeData) -> list[str]:
    """The names of what :func:`evaluate` returns."""
    return [METRIC]


def evaluate_pages(retriever: VisualRetriever, held_out: Dataset, batch_size: int) -> dict[str, float]:
    """nDCG@10 of the held-out queries over all held-out pages, scored by the processor of the model.

    Equal images are one page, and equal texts are one query, for which the pages of all its rows are relevant.
    """
    # ranx compiles for seconds when it is imported.
    import ranx

    query_column, page_column, *_ = held_out.column_names
    texts: dict[str, str] = {}
    pages: dict[str, Image.Image] = {}
    relevant: dict[str, dict[str, int]] = {}
    for number, row in enumerate(held_out):
        own = row[page_column] if isinstance(row[page_column], list) else [row[page_column]]
        names = [_name(page) for page in own]
        pages |= dict(zip(names, own, strict=True))
        query = texts.setdefault(row[query_column], f"q{number}")
        relevant.setdefault(query, {}).update(dict.fromkeys(names, 1))
    processor, model = retriever.processor, retriever.model
    queries = _encode(model, list(texts), processor.process_queries, batch_size, "Encoding queries")
    documents = _encode(model, list(pages.values()), processor.process_images, batch_size, "Encoding pages")
    scores = processor.score(queries, documents, device=model.device)
    best = scores.topk(min(DEPTH, len(pages)), dim=1)
    names = list(pages)
    run = {
        query: {names[place]: score for place, score in zip(places, values, strict=True)}
        for query, places, values in zip(relevant, best.indices.tolist(), best.values.tolist(), strict=True)
    }
    return {METRIC: float(ranx.evaluate(ranx.Qrels(relevant), ranx.Run(run), METRIC, make_comparable=True))}


def _name(page: Image.Image) -> str:
    return sha256(repr((page.mode, page.size)).encode() + page.tobytes()).hexdigest()


@torch.no_grad()
def _encode(
    model: nn.Module, items: Sequence[Any], process: Callable, batch_size: int, description: str
) -> list[Tensor]:
    """The token vectors of each item; rows of padding are zero."""
    model.eval()
    embeddings: list[Tensor] = []
    for batch in _batches(items, batch_size, description):
        embeddings += model(**process(batch).to(model.device)).cpu().unbind()
    require_finite(embeddings)
    return embeddings


def _batches(items: Sequence[Any], batch_size: int, description: str) -> Iterator[list[Any]]:
    with tqdm(total=len(items), desc=description) as progress:
        for begin in range(0, len(items), batch_size):
            batch = list(items[begin : begin + batch_size])
            yield batch
            progress.update(len(batch))
