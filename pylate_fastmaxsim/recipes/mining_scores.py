"""Scores of chosen documents for mining: by the model that searches and by the teacher."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from pylate.models import ColBERT
from sentence_transformers import CrossEncoder
from tqdm import tqdm

from pylate_fastmaxsim.ops.maxsim import maxsim
from pylate_fastmaxsim.recipes.beir import BATCHES_AT_ONCE, encode
from pylate_fastmaxsim.recipes.digest import content_digest, model_files
from pylate_fastmaxsim.recipes.mining_parts import Work
from pylate_fastmaxsim.recipes.model import NO_TOKENIZER, is_empty, load_model, loading_failure
from pylate_fastmaxsim.recipes.pairs import Pairs
from pylate_fastmaxsim.recipes.schema import MiningSection, ModelSection, RecipeError

# A query and documents for it, by their numbers, in each row.
Candidates = list[tuple[int, list[int]]]
Scorer = Callable[[Pairs, Candidates], np.ndarray]


def scored(score: Scorer, pairs: Pairs, candidates: Candidates, at_once: int, part: slice, bar: tqdm) -> np.ndarray:
    """The scores of a part of the candidates, ``at_once`` rows of which are scored together."""
    scores = []
    for first in range(part.start, part.stop, at_once):
        rows = candidates[first : min(first + at_once, part.stop)]
        scores.append(score(pairs, rows).astype(np.float32))
        bar.update(len(rows))
    return np.concatenate(scores)


def colbert_scores(model: ColBERT, pairs: Pairs, candidates: Candidates, batch_size: int) -> np.ndarray:
    """MaxSim of the candidates of each query, ``[N, K]``."""
    used = {document: place for place, document in enumerate(dict.fromkeys(d for _, row in candidates for d in row))}
    queries = encode(model, pairs.queries[[query for query, _ in candidates]]["text"], batch_size, is_query=True)
    documents = encode(model, pairs.documents[list(used)]["text"], batch_size, is_query=False)
    places = torch.tensor([[used[document] for document in row] for _, row in candidates], device=documents.device)
    with torch.no_grad():
        return maxsim(queries, documents, places).cpu().numpy()


def load_teacher(section: MiningSection, device: torch.device) -> Scorer:
    """Loaded, in main memory until it is asked: until then the device is for the search."""
    name = section.teacher
    if section.teacher_type == "colbert":
        model = load_model(ModelSection(name_or_path=name), "cpu", seed=0, key="mining.teacher")

        def by_colbert(pairs: Pairs, candidates: Candidates) -> np.ndarray:
            scores = colbert_scores(model.to(device), pairs, candidates, section.batch_size)
            lowest, highest = scores.min(1, keepdims=True), scores.max(1, keepdims=True)
            return (scores - lowest) / (highest - lowest + 1e-8)  # as PyLate's Distillation scales the student's

        return by_colbert
    try:
        encoder = CrossEncoder(name, device="cpu")
    except (OSError, ValueError, ImportError) as error:
        raise loading_failure("mining.teacher", ModelSection(name_or_path=name), error) from error
    if is_empty(encoder.tokenizer):
        raise RecipeError(NO_TOKENIZER.format("mining.teacher", name))
    if encoder.config.num_labels != 1:
        raise RecipeError(
            f"mining.teacher {name} must give one score a pair, but it gives {encoder.config.num_labels}."
        )

    def by_cross_encoder(pairs: Pairs, candidates: Candidates) -> np.ndarray:
        queries = pairs.queries[[query for query, row in candidates for _ in row]]["text"]
        documents = pairs.documents[[document for _, row in candidates for document in row]]["text"]
        texts = list(zip(queries, documents, strict=True))
        scores = encoder.to(device).predict(texts, batch_size=section.batch_size, show_progress_bar=False)
        return scores.reshape(len(candidates), -1)

    return by_cross_encoder


def grade(
    teacher: Scorer, digest: str | None, pairs: Pairs, candidates: Candidates, section: MiningSection, work: Work
) -> np.ndarray:
    """The teacher's scores of the documents of each row, ``[rows, 1 + num_negatives]``; ``digest`` is of its files."""
    at_once = max(1, BATCHES_AT_ONCE * section.batch_size // (1 + section.num_negatives))
    compute = functools.partial(scored, teacher, pairs, candidates, at_once)
    settings = {
        "mining.teacher": [section.teacher, digest],
        "mining.teacher_type": section.teacher_type,
        "mining.rows_per_part": section.rows_per_part,
        "the negatives": digest_of(pairs, candidates),
    }
    step = section.rows_per_part
    files = work.parts("teacher", settings, "Asking the teacher", " queries", len(candidates), step, compute)
    return np.concatenate(list(map(np.load, files)))


def files_digest(key: str, model: str) -> str | None:
    """Of a model in a folder, which may have been trained again since; None of one on the Hub. ``key`` is its name's."""
    if not Path(model).is_dir():
        return None
    return content_digest(key, model_files(Path(model)))


def digest_of(pairs: Pairs, candidates: Candidates) -> str:
    """The same for the same texts in the same rows."""
    rows = np.array([[query, *documents] for query, documents in candidates])
    return hashlib.sha256(pairs.digest.encode() + rows.tobytes()).hexdigest()
