"""PyLate's own evaluators: of held-out rows and of NanoBEIR."""

from __future__ import annotations

from itertools import chain
from typing import Any

from datasets import Dataset
from pylate.evaluation import (
    ColBERTDistillationEvaluator,
    ColBERTTripletEvaluator,
    NanoBEIREvaluator,
    PyLateInformationRetrievalEvaluator,
)
from pylate.models import ColBERT

from pylate_fastmaxsim.recipes.config.schema import Recipe
from pylate_fastmaxsim.recipes.evaluation.held_out import names_of_metrics, task_of
from pylate_fastmaxsim.recipes.evaluation.nano_beir import OPTIONS
from pylate_fastmaxsim.recipes.evaluation.pooling import score_functions
from pylate_fastmaxsim.recipes.evaluation.ranking import METRICS
from pylate_fastmaxsim.recipes.pooling import final_pooling

NAME = "held-out"

# PyLate's evaluators hold the similarity of every query token and document token. They are given so many documents or
# rows at once that this stays below 2**27 fp32 values (512 MiB).
EVALUATION_SIMILARITIES = 2**27


def evaluate_held_out(recipe: Recipe, model: ColBERT, held_out: Dataset) -> dict[str, float]:
    """nDCG@10, and ``kl_divergence`` for rows with teacher scores or ``accuracy`` for rows with negatives."""
    retrieval = retrieval_evaluator(recipe, held_out, model)
    metrics = {"ndcg@10": retrieval(model)[retrieval.primary_metric]}
    names = names_of_metrics(recipe, held_out)
    if "kl_divergence" in names:
        metrics["kl_divergence"] = kl_divergence(recipe, held_out, model)
    if "accuracy" in names:
        metrics["accuracy"] = triplet_evaluator(recipe, held_out)(model)["accuracy"]
    return metrics


def retrieval_evaluator(recipe: Recipe, held_out: Dataset, model: ColBERT) -> PyLateInformationRetrievalEvaluator:
    """nDCG@10 of the held-out queries over all held-out documents."""
    task = task_of(recipe, held_out)
    return PyLateInformationRetrievalEvaluator(
        {query: text for text, query in task.queries.items()},
        {document: text for text, document in task.documents.items()},
        task.relevant,
        corpus_chunk_size=at_once(len(task.queries), model),
        score_functions=score_functions(final_pooling(recipe.loss.pooling)),
        **_options(recipe),
    )


def triplet_evaluator(recipe: Recipe, held_out: Dataset) -> ColBERTTripletEvaluator:
    """How often a query scores its positive higher than its first negative."""
    rows = held_out[:]
    anchors, positives, negatives = (rows[column] for column in held_out.column_names[:3])
    return ColBERTTripletEvaluator(anchors, positives, negatives, **_options(recipe))


def kl_divergence(recipe: Recipe, held_out: Dataset, model: ColBERT) -> float:
    """KL divergence of the model's distribution over the documents of a row from the teacher's, mean over the rows."""
    query_column, document_column, score_column = held_out.column_names
    options = {} if recipe.loss.normalize_scores is None else {"normalize_scores": recipe.loss.normalize_scores}
    evaluator = ColBERTDistillationEvaluator([], [], [], **_options(recipe), **options)
    # PyLate leaves it unset, and then fails for an evaluator with a name.
    evaluator.primary_metric = "kl_divergence"
    # PyLate pads and scores all rows at once, which would not fit into memory.
    rows_at_once, total = at_once(len(held_out[0][document_column]), model), 0.0
    for begin in range(0, len(held_out), rows_at_once):
        rows = held_out[begin : begin + rows_at_once]
        evaluator.queries = rows[query_column]
        evaluator.documents = list(chain.from_iterable(rows[document_column]))
        evaluator.scores = rows[score_column]
        (part,) = evaluator(model).values()
        total += part * len(evaluator.queries)
    mean = total / len(held_out)
    evaluator.store_metrics_in_model_card_data(model, {f"{NAME}_kl_divergence": mean})
    return mean


def at_once(others: int, model: ColBERT) -> int:
    """How many texts to score at a time, each against ``others`` texts."""
    return max(1, EVALUATION_SIMILARITIES // (others * model.query_length * model.document_length))


def _options(recipe: Recipe) -> dict[str, Any]:
    return {
        "batch_size": recipe.evaluation.batch_size,
        "show_progress_bar": True,
        "name": NAME,
        "write_csv": False,
    }


def nano_beir_evaluator(recipe: Recipe) -> NanoBEIREvaluator:
    """PyLate's evaluator for the sets of ``evaluation.nano_beir``, which are loaded."""
    return NanoBEIREvaluator(
        recipe.evaluation.nano_beir,
        batch_size=recipe.evaluation.batch_size,
        score_functions=score_functions(final_pooling(recipe.loss.pooling)),
        **OPTIONS,
    )


def evaluate_nano_beir(model: ColBERT, evaluator: NanoBEIREvaluator) -> dict[str, float]:
    """nDCG@10, MRR@10 and Recall@100, each the mean over the sets."""
    for part in evaluator.evaluators:
        part.corpus_chunk_size = at_once(len(part.queries), model)
    metrics = evaluator(model)
    mean = evaluator.primary_metric.removesuffix("ndcg@10")
    return {name: float(metrics[f"{mean}{name}"]) for name in METRICS}
