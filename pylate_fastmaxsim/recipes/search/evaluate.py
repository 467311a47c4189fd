"""Evaluate models one after the other on a collection, and compare them."""

import csv
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path
from typing import Any

from pylate_fastmaxsim.files.replace import replace_file
from pylate_fastmaxsim.recipes.data.collection import Collection, is_of_pages
from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.evaluation.ranking import metrics_by_query, require_ids_of_one_word
from pylate_fastmaxsim.recipes.files import prepare_file
from pylate_fastmaxsim.recipes.models.retriever import Retriever, retriever_of
from pylate_fastmaxsim.recipes.search.plaid import overlap
from pylate_fastmaxsim.recipes.search.pool_curve import write_pool_curve
from pylate_fastmaxsim.recipes.search.run import (
    METRICS_BY_DEPTH,
    Options,
    Progress,
    Search,
    best_device,
    check_first_stage,
    check_format,
)
from pylate_fastmaxsim.recipes.search.significance import Scores, compare
from pylate_fastmaxsim.recipes.targets import Target, short_name

SUFFIXES = (".jsonl", ".tsv")  # of metrics of each query


def evaluate(
    targets: Sequence[Target],
    name: str,
    collection: Collection,
    options: Options,
    progress: Progress,
    per_query: Path | None = None,
    test: str = "student",
    pool_factors: Sequence[float] | None = None,
    plot: Path | None = None,
) -> dict[str, Any]:
    """Search all judged queries with each model, exactly, with documents pooled by each factor; None: that of its recipe.

    ``options.run`` and ``options.index`` are folders, in which each model has a file or a folder. ``per_query`` is a file
    for the metrics of each query, ``plot`` one for a picture of nDCG@10 against vectors.

    Returns
    -------
    ``collection`` (its name), ``queries`` and ``documents`` (how many); ``models``: of each its ``label``, the summary
    of its search and its ``metrics``, with ``options.first_stage`` also those of late interaction after it, and what
    share of the best of an exhaustive search that finds; ``test`` and ``pairs``: each two models by each metric
    (:func:`~pylate_fastmaxsim.recipes.search.significance.compare`). A factor is compared with the first of its model, and
    models at the same factor.
    """
    targets = [
        replace(
            each,
            label=f"{each.label}-pool-{factor:g}" if pool_factors and factor > 1 else each.label,
            pool_factor=factor,
        )
        for each in targets
        for factor in pool_factors or (each.pool_factor,)
    ]
    if options.format is not None:
        check_format(options.format, options.index)
    if check_first_stage(options) is not None and is_of_pages(collection.corpus):
        raise RecipeError("--first-stage searches texts, but the documents are pages.")
    if options.run is not None:
        require_ids_of_one_word(collection)
        _prepare_runs(options, targets)
    if per_query is not None:
        if per_query.suffix not in SUFFIXES:
            raise RecipeError(f"--per-query must be a file that ends in {' or '.join(SUFFIXES)}, got {per_query}.")
        prepare_file("--per-query", per_query, options.inputs)
    if plot is not None:
        if plot.suffix != ".png":
            raise RecipeError(f"--plot must be a file that ends in .png, got {plot}.")
        prepare_file("--plot", plot, options.inputs)
    models: list[dict[str, Any]] = []
    scores: Scores = {}
    of_target: dict[str, Target] = {}
    for target in targets:
        for summary, by_query in _evaluate(target, collection, options, progress):
            models.append(summary)
            scores[summary["label"]], of_target[summary["label"]] = by_query, target
    if per_query is not None:
        write_per_query(per_query, scores)

    def are_compared(one: Target, other: Target) -> bool:
        of_first = pool_factors is None or (one.path == other.path and one.pool_factor == pool_factors[0])
        return of_first or one.pool_factor == other.pool_factor

    pairs = [
        (label, other_label)
        for (label, one), (other_label, other) in combinations(of_target.items(), 2)
        if are_compared(one, other)
    ]
    result = {
        "collection": name,
        "queries": len(collection.queries),
        "documents": len(collection.corpus),
        "models": models,
        "test": test,
        "pairs": compare(scores, test, pairs),
    }
    if plot is not None:
        write_pool_curve(result, plot)
    return result


def _evaluate(
    target: Target, collection: Collection, options: Options, progress: Progress
) -> Iterator[tuple[dict[str, Any], dict[str, dict[str, float]]]]:
    """The summary of a model, and its metrics by query; then those behind a first stage."""
    model = target.load(best_device(), options.trust_remote_code)
    model = retriever_of(model, finite=True, exact=options.exact, pool_factor=target.pool_factor)
    options = replace(
        options,
        k=max(METRICS_BY_DEPTH.values()),
        index=options.index if model.has_vectors else None,
        format=options.format if model.has_token_embeddings else None,
        batch_size=options.batch_size or target.batch_size,
        pooling=target.pooling,
        pool_factor=target.pool_factor,
    )

    def progress_of_model(task: str, total: int, done: int = 0) -> Callable[[int], None]:
        return progress(f"{target.label}: {task}", total, done)

    stages = (None, options.first_stage) if options.first_stage and model.kind == Retriever.kind else (None,)
    exhaustive: Search | None = None
    for stage in stages:
        label = _label(target, stage)
        run = None if options.run is None else _run_file(options.run, label)
        task = Search(target.path, model, collection, replace(options, first_stage=stage, run=run), progress_of_model)
        if options.index is not None:
            task.options = replace(task.options, index=options.index / _index_name(target, task))
        if exhaustive is not None:
            task.queries = exhaustive.queries
        found = task.ranking()
        by_query = metrics_by_query(found, collection, list(METRICS_BY_DEPTH))
        means = {metric: sum(values.values()) / len(values) for metric, values in by_query.items()}
        shares = {} if exhaustive is None else overlap(exhaustive.positions, task.positions)
        yield {"label": label, **task.summary(), **shares, "pooling": str(target.pooling), "metrics": means}, by_query
        exhaustive = task


def _label(target: Target, first_stage: str | None) -> str:
    return target.label if first_stage is None else f"{target.label} after {first_stage}"


def _run_file(folder: Path, label: str) -> Path:
    return folder / f"{label.replace('/', '-')}.trec"


def _prepare_runs(options: Options, targets: Sequence[Target]) -> None:
    """Make the folder of run files. RecipeError if one cannot be written, or would be that of two models."""
    labels: dict[Path, str] = {}
    for target, stage in product(targets, {None: None, options.first_stage: None}):
        label = _label(target, stage)
        file = _run_file(options.run, label)
        prepare_file("--run", file, options.inputs)
        if file in labels:
            raise RecipeError(
                f"--run: {labels[file]} and {label} would be written to one file, {file}; evaluate them apart."
            )
        labels[file] = label


def _index_name(target: Target, task: Search) -> str:
    """The name of the folder of an index: another for other weights and settings, another collection or another format."""
    made_of = task.description
    parts = f"{made_of.model_digest} {made_of.corpus_digest} {made_of.stored}"
    own = short_name(target.path) if target.recipe is None else target.recipe.name
    return f"{own}-{hashlib.blake2b(parts.encode(), digest_size=6).hexdigest()}"


def write_per_query(file: Path, scores: Scores) -> None:
    """Write a row for each query and model: their names and each metric; the file appears when it is complete."""
    rows = [
        {"query": query, "model": model, **{name: values[query] for name, values in metrics.items()}}
        for model, metrics in scores.items()
        for query in next(iter(metrics.values()))
    ]

    def write(scratch: str) -> None:
        with open(scratch, "w", encoding="utf-8", newline="") as lines:
            if file.suffix == ".jsonl":
                lines.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            else:
                table = csv.DictWriter(lines, list(rows[0]), delimiter="\t", lineterminator="\n")
                table.writeheader()
                table.writerows(rows)

    replace_file(file, write)
