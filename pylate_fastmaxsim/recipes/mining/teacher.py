"""Scores of a query's documents by the teacher."""

import hashlib
from collections.abc import Callable

import numpy as np
import torch
from sentence_transformers import CrossEncoder
from transformers import PretrainedConfig

from pylate_fastmaxsim.ops.maxsim import maxsim
from pylate_fastmaxsim.recipes.config.kinds import MODELS
from pylate_fastmaxsim.recipes.config.schema import MiningSection
from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.mining.pairs import Pairs
from pylate_fastmaxsim.recipes.mining.resumable import Work, read_parts
from pylate_fastmaxsim.recipes.models.load import (
    HostModel,
    encoder_of,
    has_projection,
    load_model,
    model_failure,
    require_tokenizer,
)
from pylate_fastmaxsim.recipes.models.retriever import BATCHES_AT_ONCE, retriever_of
from pylate_fastmaxsim.reporting.progress import Progress

# Rows of a query and its documents, by their numbers.
Candidates = list[tuple[int, list[int]]]
Scorer = Callable[[Pairs, Candidates], np.ndarray]


def require_finite_scores(source: str, scores: np.ndarray) -> None:
    """Refuse NaN and infinite scores before they decide about negatives."""
    if not np.isfinite(scores).all():
        raise RecipeError(f"{source} must give scores that are finite numbers, but some of them are NaN or infinite.")


def colbert_scores(model: HostModel, pairs: Pairs, candidates: Candidates, batch_size: int) -> np.ndarray:
    """MaxSim of the candidates of each query, ``[N, K]``."""
    used = {document: place for place, document in enumerate(dict.fromkeys(d for _, row in candidates for d in row))}
    retriever = retriever_of(model)
    queries = retriever.encode(pairs.queries[[query for query, _ in candidates]]["text"], batch_size, is_query=True)
    documents = retriever.encode(pairs.documents[list(used)]["text"], batch_size, is_query=False)
    places = torch.tensor([[used[document] for document in row] for _, row in candidates], device=documents.device)
    with torch.no_grad():
        return maxsim(queries, documents, places).cpu().numpy()


def load_teacher(section: MiningSection, device: torch.device, kind: str = "colbert") -> Scorer:
    """Load the teacher into main memory. It moves to ``device`` when it is first called, after the search.

    ``kind`` is that of the model that searches, with whose library a teacher of late interaction is loaded.
    """
    name = section.teacher
    if section.teacher_type == "colbert":
        model = load_model(MODELS[kind](name_or_path=name), "cpu", seed=0, key="mining.teacher")
        _require_projection(name, encoder_of(model).config)

        def by_colbert(pairs: Pairs, candidates: Candidates) -> np.ndarray:
            scores = colbert_scores(model.to(device), pairs, candidates, section.batch_size)
            lowest, highest = scores.min(1, keepdims=True), scores.max(1, keepdims=True)
            return (scores - lowest) / (highest - lowest + 1e-8)  # as PyLate's Distillation scales the student's

        return by_colbert
    try:
        encoder = CrossEncoder(name, device="cpu")
        drawn = _missing_head_weights(encoder, name)
    except Exception as error:  # as in load_model
        raise model_failure("mining.teacher", name, error) from error
    require_tokenizer(encoder.tokenizer, "mining.teacher", name)
    if drawn:
        other = "set mining.teacher_type to colbert" if has_projection(name) else "name a cross-encoder"
        raise RecipeError(
            f"mining.teacher {name} must have a scoring head, as a cross-encoder has, but its checkpoint holds no "
            f"{drawn[0]}, so that its scores would be random; {other}."
        )
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


def _missing_head_weights(encoder: CrossEncoder, name: str) -> list[str]:
    """The weights of the head that the checkpoint lacks, which transformers draws at random."""
    model = encoder.model
    # On the meta device no weights are read again.
    _, loading = type(model).from_pretrained(name, config=model.config, output_loading_info=True, device_map="meta")
    inside = f"{model.base_model_prefix}."  # the encoder, which may lack a pooler that no head uses
    return sorted(key for key in loading["missing_keys"] if not key.startswith(inside))


def _require_projection(name: str, config: PretrainedConfig) -> None:
    """Refuse a model to which PyLate would add a projection with random weights."""
    if has_projection(name):
        return
    is_classifier = any(name.endswith("ForSequenceClassification") for name in config.architectures or ())
    other = "set mining.teacher_type to cross_encoder" if is_classifier else "name a trained ColBERT"
    raise RecipeError(
        f"mining.teacher {name} must have a projection, as a ColBERT has, but its checkpoint holds none, so that its "
        f"scores would be random; {other}."
    )


def grade(teacher: Scorer, pairs: Pairs, candidates: Candidates, section: MiningSection, work: Work) -> np.ndarray:
    """The teacher's scores of the documents of each row, ``[rows, 1 + num_negatives]``."""
    at_once = max(1, BATCHES_AT_ONCE * section.batch_size // (1 + section.num_negatives))

    def compute(part: slice, bar: Progress) -> np.ndarray:
        scores = []
        for first in range(part.start, part.stop, at_once):
            rows = candidates[first : min(first + at_once, part.stop)]
            scores.append(teacher(pairs, rows).astype(np.float32))
            require_finite_scores(f"mining.teacher {section.teacher}", scores[-1])
            bar.update(len(rows))
        return np.concatenate(scores)

    rows = np.array([[query, *documents] for query, documents in candidates])
    settings = {
        "mining.teacher": section.teacher,
        "mining.teacher_type": section.teacher_type,
        "the negatives": hashlib.sha256(pairs.digest.encode() + rows.tobytes()).hexdigest(),
    }
    title, unit = "Asking the teacher", " queries"
    return read_parts(work.parts("teacher", settings, title, unit, len(candidates), "rows_per_part", compute))
