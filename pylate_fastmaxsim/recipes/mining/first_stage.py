"""Candidates of each query by a sparse search, part by part, so that only they need be scored exactly."""

import functools
import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pylate_fastmaxsim.recipes.config.schema import MiningSection
from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.evaluation.first_stage import FirstStage, load_first_stage, search_device
from pylate_fastmaxsim.recipes.mining.negatives import documents_kept
from pylate_fastmaxsim.recipes.mining.pairs import Pairs
from pylate_fastmaxsim.recipes.mining.resumable import Work, read_parts
from pylate_fastmaxsim.recipes.models.load import HostModel
from pylate_fastmaxsim.recipes.models.retriever import BATCHES_AT_ONCE
from pylate_fastmaxsim.reporting.progress import Progress
from pylate_fastmaxsim.retrieval.sparse.index import SparseIndex
from pylate_fastmaxsim.sparse import SparseBatch

logger = logging.getLogger(__name__)


def load_mining_stage(section: MiningSection, model: HostModel, pairs: Pairs, device: torch.device) -> FirstStage:
    """Load what ``mining.first_stage`` names; its ``k`` must leave enough negatives."""
    first, needed = section.first_stage, documents_kept(pairs, section)
    if first.k < needed:
        raise RecipeError(
            f"mining.first_stage.k must be at least {needed}, mining.range_max plus the largest number of positives of a "
            f"query, got {first.k}."
        )
    return load_first_stage("mining.first_stage.model", first, model.tokenizer, section.batch_size, device)


def find_candidates(
    stage: FirstStage, pairs: Pairs, section: MiningSection, work: Work, common: dict[str, Any], device: torch.device
) -> np.ndarray:
    """Numbers of the candidates of each query, ``[Nq, K]`` int32, best first; -1 where too few share a term with it."""
    first, documents = section.first_stage, len(pairs.documents)
    k = min(first.k, documents)
    device = search_device(device)

    def encode_documents(part: slice, bar: Progress) -> dict[str, np.ndarray]:
        batches = []
        for rows in pairs.documents.select(range(part.start, part.stop)).iter(BATCHES_AT_ONCE * section.batch_size):
            batches.append(stage.documents(rows["text"]).to("cpu"))
            bar.update(len(batches[-1]))
        batch = SparseBatch.concatenate(batches)
        return {name: getattr(batch, name).numpy() for name in ("offsets", "terms", "weights")} | {
            "vocabulary": np.array(batch.vocabulary)
        }

    made = {
        "mining.pairs or mining.corpus": common["mining.pairs or mining.corpus"],
        # What the sparse vectors on disk depend on.
        "mining.first_stage": {name: getattr(first, name) for name in ("kind", "model", "threshold")},
        # BM25 counts the tokens of its tokenizer.
        **({"model": common["model"]} if first.kind == "bm25" else {}),
    }
    title = "Encoding for the first stage"
    files = work.parts("sparse", made, title, " documents", documents, "documents_per_part", encode_documents)

    @functools.cache
    def index() -> SparseIndex:
        return SparseIndex.build(stage.weighted(lambda: map(_read, files)), device=device)

    def search(part: slice, bar: Progress) -> np.ndarray:
        queries = stage.queries(pairs.queries[part.start : part.stop]["text"]).to(device)
        _, found = index().search(queries, k)
        bar.update(len(queries))
        return found.int().cpu().numpy()

    settings, title = made | {"mining.first_stage": asdict(first)}, "Searching the first stage"
    files = work.parts("candidates", settings, title, " queries", len(pairs.queries), "rows_per_part", search)
    candidates = read_parts(files)
    needed = min(documents_kept(pairs, section), documents)
    few = int(((candidates >= 0).sum(1) < needed).sum())
    if few and work.processes.is_main_process:
        logger.warning(
            "mining.first_stage finds fewer than %d documents for %d of %d queries, which have fewer to choose from.",
            needed,
            few,
            len(candidates),
        )
    return candidates


def _read(file: Path) -> SparseBatch:
    with np.load(file) as arrays:
        offsets, terms, weights = (torch.from_numpy(arrays[name]) for name in ("offsets", "terms", "weights"))
        return SparseBatch._trusted(offsets, terms, weights, int(arrays["vocabulary"]))
