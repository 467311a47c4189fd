"""Evaluate models one after the other on a collection, and compare them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pylate_fastmaxsim.recipes.data.collection import Collection
from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.evaluation.ranking import metrics_by_query
from pylate_fastmaxsim.recipes.files import prepare_file
from pylate_fastmaxsim.recipes.models.retriever import retriever_of
from pylate_fastmaxsim.recipes.search.results import (
    prepare_per_query,
    require_ids_of_one_word,
    write_per_query,
    write_run,
)
from pylate_fastmaxsim.recipes.search.run import METRICS_BY_DEPTH, Progress, Search, best_device, check_format
from pylate_fastmaxsim.recipes.search.run import Options as SearchOptions
from pylate_fastmaxsim.recipes.search.significance import Scores, compare
from pylate_fastmaxsim.recipes.targets import Target, short_name


@dataclass(frozen=True)
class Options:
    """The options of the command, by their names."""

    run: Path | None = None
    per_query: Path | None = None
    index: Path | None = None
    format: str | None = None
    batch_size: int | None = None
    trust_remote_code: bool = False
    test: str = "student"
    inputs: Sequence[Path | None] = ()  # what is read, and so not written to


def evaluate(
    targets: Sequence[Target], name: str, collection: Collection, options: Options, progress: Progress
) -> dict[str, Any]:
    """Search all judged queries with each model, exactly.

    Returns
    -------
    ``collection`` (its name), ``queries`` and ``documents`` (how many); ``models``: of each its ``label``, the summary
    of its search and its ``metrics``; ``test`` and ``pairs``: each two models by each metric
    (:func:`~pylate_fastmaxsim.recipes.search.significance.compare`).
    """
    if options.format is not None:
        check_format(options.format, options.index)
    if options.run is not None:
        require_ids_of_one_word(collection)
        _prepare_runs(options, targets)
    if options.per_query is not None:
        prepare_per_query(options.per_query, options.inputs)
    models: list[dict[str, Any]] = []
    scores: Scores = {}
    for target in targets:
        summary, scores[target.label] = _evaluate(target, collection, options, progress)
        models.append(summary)
    if options.per_query is not None:
        write_per_query(options.per_query, scores)
    return {
        "collection": name,
        "queries": len(collection.queries),
        "documents": len(collection.corpus),
        "models": models,
        "test": options.test,
        "pairs": compare(scores, options.test),
    }


def _evaluate(
    target: Target, collection: Collection, options: Options, progress: Progress
) -> tuple[dict[str, Any], dict[str, dict[str, float]]]:
    """The summary of a model, and its metrics by query."""
    model = retriever_of(target.load(best_device(), options.trust_remote_code), finite=True)
    searching = SearchOptions(
        k=max(METRICS_BY_DEPTH.values()),
        run=None if options.run is None else _run_file(options.run, target),
        index=options.index,
        format=options.format if model.has_token_embeddings else None,
        batch_size=options.batch_size or target.batch_size,
        pooling=target.pooling,
    )

    def progress_of_model(task: str, total: int, done: int = 0) -> Callable[[int], None]:
        return progress(f"{target.label}: {task}", total, done)

    task = Search(target.path, model, collection, searching, progress_of_model)
    if options.index is not None:
        task.options = replace(searching, index=options.index / _index_name(target, task))
    found = task.ranking()
    if searching.run is not None:
        write_run(searching.run, found)
    by_query = metrics_by_query(found, collection, list(METRICS_BY_DEPTH))
    means = {metric: sum(values.values()) / len(values) for metric, values in by_query.items()}
    return {"label": target.label, **task.summary(), "pooling": str(target.pooling), "metrics": means}, by_query


def _run_file(folder: Path, target: Target) -> Path:
    return folder / f"{target.label.replace('/', '-')}.trec"


def _prepare_runs(options: Options, targets: Sequence[Target]) -> None:
    """Make the folder of run files. RecipeError if one cannot be written, or would be that of two models."""
    labels: dict[Path, str] = {}
    for target in targets:
        file = _run_file(options.run, target)
        prepare_file("--run", file, options.inputs)
        if file in labels:
            raise RecipeError(
                f"--run: {labels[file]} and {target.label} would be written to one file, {file}; evaluate them apart."
            )
        labels[file] = target.label


def _index_name(target: Target, task: Search) -> str:
    """The name of the folder of an index: another for other weights and settings, another collection or another format."""
    made_of = task.description
    parts = f"{made_of.model_digest} {made_of.corpus_digest} {made_of.stored}"
    own = short_name(target.path) if target.recipe is None else target.recipe.name
    return f"{own}-{hashlib.blake2b(parts.encode(), digest_size=6).hexdigest()}"
