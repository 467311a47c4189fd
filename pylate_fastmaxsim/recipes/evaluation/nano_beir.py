"""Retrieval on NanoBEIR with PyLate's own evaluator."""

from __future__ import annotations

from pylate.evaluation import NanoBEIREvaluator
from pylate.evaluation.nano_beir_evaluator import MAPPING_DATASET_NAME_TO_ID
from pylate.models import ColBERT

from pylate_fastmaxsim.ops.pooled import Max, Pooling
from pylate_fastmaxsim.recipes.config.schema import EvaluationSection
from pylate_fastmaxsim.recipes.data.tables import progress_shown, table_failure
from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.evaluation.held_out import at_once
from pylate_fastmaxsim.recipes.evaluation.pooling import score_functions
from pylate_fastmaxsim.recipes.evaluation.ranking import METRICS

KEY = "evaluation.nano_beir"


def check_names(names: list[str]) -> None:
    """Refuse unknown names and repeated sets. Upper and lower case are the same, as for PyLate."""
    for name in names:
        if name.lower() not in MAPPING_DATASET_NAME_TO_ID:
            raise RecipeError(f"{KEY} must name sets out of {', '.join(MAPPING_DATASET_NAME_TO_ID)}, got {name!r}.")
    if len({name.lower() for name in names}) < len(names):
        raise RecipeError(f"{KEY} must name each set once, got {', '.join(names)}.")


def load_nano_beir(section: EvaluationSection, pooling: Pooling = Max()) -> NanoBEIREvaluator:
    """PyLate's evaluator for the sets of ``evaluation.nano_beir``, which are loaded.

    Raises
    ------
    RecipeError
        A set cannot be loaded.
    """
    try:
        with progress_shown():
            return NanoBEIREvaluator(
                section.nano_beir,
                precision_recall_at_k=[100],
                batch_size=section.batch_size,
                show_progress_bar=True,
                write_csv=False,
                score_functions=score_functions(pooling),
            )
    except Exception as error:  # as in load_table
        raise table_failure(KEY, error) from error


def evaluate_nano_beir(model: ColBERT, evaluator: NanoBEIREvaluator) -> dict[str, float]:
    """nDCG@10, MRR@10 and Recall@100, each the mean over the sets."""
    for part in evaluator.evaluators:
        part.corpus_chunk_size = at_once(len(part.queries), model)
    metrics = evaluator(model)
    mean = evaluator.primary_metric.removesuffix("ndcg@10")
    return {name: float(metrics[f"{mean}{name}"]) for name in METRICS}
