"""``fastmaxsim evaluate``: metrics of trained models on a collection, and whether they differ."""

from __future__ import annotations

import argparse

from pylate_fastmaxsim.cli.search import add_encoding, kept_documents
from pylate_fastmaxsim.cli.terminal import (
    add_collection,
    add_overrides,
    at_least,
    from_arguments,
    path,
    plain,
    progress_of_tasks,
    quiet_libraries,
    report_interruption,
)
from pylate_fastmaxsim.recipes.errors import RecipeError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add models and recipes, a collection, and where the results go."""
    add = parser.add_argument
    add(
        "models",
        nargs="+",
        metavar="MODEL_OR_RECIPE",
        help="models, as for search, and recipes (.yaml, or names of fastmaxsim recipes) whose models are trained",
    )
    add_overrides(parser)
    add_collection(parser, ", in place of what the recipe is evaluated on")
    add_encoding(parser, ", of each model in a folder of its own")
    add("--run", type=path, metavar="DIR", help="write the results of each model as a TREC run file in this folder")
    add("--per-query", type=path, metavar="FILE", help="write the metrics of each query, .jsonl or .tsv")
    add(
        "--test",
        choices=["student", "fisher"],
        default="student",
        help="how models are compared: the paired t-test (student), or Fisher's randomisation test",
    )
    add("--json", type=path, metavar="FILE", help="write everything that is printed as JSON")
    add("--batch-size", type=at_least(1), help="texts encoded at once: that of the recipe, or 32")


def run(options: argparse.Namespace) -> None:
    """Evaluate, and print the metrics, the tests and where indexes and run files are."""
    from pylate_fastmaxsim.recipes.files import files_of_collection, prepare_file, write_json
    from pylate_fastmaxsim.recipes.search.evaluate import evaluate
    from pylate_fastmaxsim.recipes.search.run import Options
    from pylate_fastmaxsim.recipes.tables import metrics_table, pairs_table
    from pylate_fastmaxsim.recipes.targets import find_collection, find_targets

    quiet_libraries()
    inputs = (*map(path, options.models), options.index, *files_of_collection(options.beir))
    if options.json is not None:
        prepare_file("--json", options.json, inputs)
        if options.per_query is not None and options.per_query.resolve() == options.json.resolve():
            raise RecipeError("--per-query and --json must be two files.")
    settings = from_arguments(Options, options, inputs=inputs)
    targets = find_targets(options.models, options.overrides)
    with report_interruption(lambda: kept_documents(options.index)):
        name, collection, _ = find_collection(targets, options.beir, options.split)
        with progress_of_tasks() as begin:
            result = evaluate(targets, name, collection, settings, begin, options.per_query, options.test)
        if options.json is not None:
            write_json(options.json, result)
    plain.print(metrics_table(result))
    if result["pairs"]:
        plain.print(pairs_table(result))
    for model in result["models"]:
        print(*(f"{model[place]}\n" for place in ("index", "run") if model[place] is not None), sep="", end="")
