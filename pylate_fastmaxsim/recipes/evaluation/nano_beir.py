"""Sets of NanoBEIR, loaded by the evaluator that the library of the model has for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from datasets import Dataset

from pylate_fastmaxsim.recipes.config.schema import Recipe
from pylate_fastmaxsim.recipes.data.collection import Collection
from pylate_fastmaxsim.recipes.data.tables import table_failure
from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.kind import Kind

if TYPE_CHECKING:
    from sentence_transformers.evaluation import InformationRetrievalEvaluator

KEY = "evaluation.nano_beir"
NAMES = (
    *("climatefever", "dbpedia", "fever", "fiqa2018", "hotpotqa", "msmarco", "nfcorpus", "nq", "quoraretrieval"),
    *("scidocs", "arguana", "scifact", "touche2020"),
)
# Of every library's evaluator.
OPTIONS = {"precision_recall_at_k": [100], "show_progress_bar": True, "write_csv": False}


def check_names(names: list[str]) -> None:
    """Refuse unknown names and repeated sets. Upper and lower case are the same, as for the libraries."""
    for name in names:
        if name.lower() not in NAMES:
            raise RecipeError(f"{KEY} must name sets out of {', '.join(NAMES)}, got {name!r}.")
    if len({name.lower() for name in names}) < len(names):
        raise RecipeError(f"{KEY} must name each set once, got {', '.join(names)}.")


def load_nano_beir(recipe: Recipe, kind: Kind) -> list[Collection]:
    """The collections of ``evaluation.nano_beir``, loaded by the evaluator that the library of the model has for them."""
    try:
        evaluator = kind.nano_beir_evaluator(recipe.evaluation.nano_beir, **OPTIONS)
    except Exception as error:  # as in load_table
        raise table_failure(KEY, error) from error
    return list(map(collection_of, evaluator.evaluators))


def collection_of(evaluator: InformationRetrievalEvaluator) -> Collection:
    """The queries, documents and judgements of an evaluator."""
    return Collection(
        Dataset.from_dict({"_id": evaluator.corpus_ids, "text": evaluator.corpus}),
        dict(zip(evaluator.queries_ids, evaluator.queries, strict=True)),
        {query: dict.fromkeys(sorted(evaluator.relevant_docs[query]), 1) for query in evaluator.queries_ids},
    )
