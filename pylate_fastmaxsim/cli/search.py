"""``fastmaxsim search`` and ``evaluate``: the results of models on a collection."""

import argparse
from pathlib import Path

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
    several,
)
from pylate_fastmaxsim.files.replace import write_json
from pylate_fastmaxsim.recipes.errors import RecipeError


def add_search_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "model",
        metavar="MODEL",
        help="a ColBERT of PyLate, a model of Sentence Transformers or model2vec, by its folder or its name on the Hub, or the "
        "folder of a StaticLateInteraction",
    )
    add_collection(parser, "; its judged queries")
    add("--corpus", type=path, metavar="FILE", help="documents, .jsonl or .parquet, with _id, text and perhaps title")
    add("--queries", type=path, metavar="FILE", help="queries, .jsonl or .parquet, with _id and text")
    add("--qrels", type=path, metavar="FILE", help="judgements, as in BEIR or TREC, for metrics of these queries")
    add("--k", type=at_least(1), default=1000, help="results of each query (%(default)s)")
    add("--run", type=path, metavar="FILE", help="write the results as a TREC run file")
    add_encoding(parser)
    add(
        "--pool-factor",
        type=at_least(1, float),
        default=1,
        metavar="N",
        help="keep one vector for N tokens of a document: the means of hierarchical clusters (%(default)s)",
    )
    add(
        "--plaid",
        type=path,
        metavar="DIR",
        help="search all that this index of PLAID stores, in place of encoded documents, and say how much of the best its own "
        "search finds",
    )
    add(
        "--dense",
        action="store_true",
        help="rank a StaticEmbedding or a model of model2vec by its own embeddings, not by MaxSim",
    )
    add("--batch-size", type=at_least(1), default=32, help="texts encoded at once (%(default)s)")
    add("--json", type=path, metavar="FILE", help="write metrics and times as JSON")


def add_encoding(parser: argparse.ArgumentParser, place: str = "", compared: str = "") -> None:
    add = parser.add_argument
    add(
        "--index",
        type=path,
        metavar="DIR",
        help=f"keep the encoded documents here{place}: an interrupted command goes on, a further one encodes none",
    )
    add(
        "--format",
        help="of token embeddings in the index: float32 (the default), bfloat16, float16, int8, fp8, residual-1, residual-2 or "
        "residual-4",
    )
    add(
        "--exact",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="rank a static model by MaxSim, or by the upper bounds of its sparse vectors",
    )
    add(
        "--first-stage",
        metavar="STAGE",
        help=f"score with late interaction only the candidates of this search: bm25, sparse:MODEL or static:MODEL{compared}",
    )
    add("--candidates", type=at_least(1), metavar="N", help="documents of each query that the first stage finds (1000)")
    add("--trust-remote-code", action="store_true", help="run code that comes with a model")


def kept_documents(index: Path | None) -> str:
    """A clause that says what an interrupted command leaves."""
    if index is None:
        return "documents are kept with --index only, and the same command starts again"
    return f"what is encoded is kept in {index}, and the same command goes on from there"


def run_search(options: argparse.Namespace) -> None:
    from pylate_fastmaxsim.cli.tables import search_table
    from pylate_fastmaxsim.recipes.files import files_of_collection, prepare_file
    from pylate_fastmaxsim.recipes.search.run import Options, search
    from pylate_fastmaxsim.recipes.targets import load_searched_collection

    sources = options.corpus, options.queries, options.qrels
    inputs = (path(options.model), *sources, options.index, options.plaid, *files_of_collection(options.beir))
    settings = from_arguments(Options, options, inputs=inputs)
    quiet_libraries()
    if options.json is not None:
        prepare_file("--json", options.json, inputs)
        if options.run is not None and options.run.resolve() == options.json.resolve():
            raise RecipeError("--run and --json must be two files.")
    with report_interruption(lambda: kept_documents(options.index)), progress_of_tasks() as begin:
        result = search(options.model, load_searched_collection(options.beir, options.split, *sources), settings, begin)
        if options.json is not None:
            write_json(options.json, result)
    plain.print(search_table(result))


def add_evaluate_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "models",
        nargs="+",
        metavar="MODEL_OR_RECIPE",
        help="models, as for search, and recipes (.yaml, or names of fastmaxsim recipes) whose models are trained",
    )
    add(
        "--dense",
        action="append",
        default=[],
        dest="dense_models",
        metavar="MODEL",
        help="also a StaticEmbedding or a model of model2vec, ranked by its own embeddings (may repeat)",
    )
    add_overrides(parser)
    add_collection(parser, ", in place of what the recipe is evaluated on")
    add_encoding(parser, ", of each model in a folder of its own", ", beside an exhaustive search")
    add("--run", type=path, metavar="DIR", help="write the results of each model as a TREC run file in this folder")
    add(
        "--pool-factor",
        dest="pool_factors",
        type=several(at_least(1, float)),
        metavar="N,N,...",
        help="evaluate each model with one vector for N tokens of a document, for each N, and 1 for documents as they are",
    )
    add("--plot", type=path, metavar="FILE", help="draw nDCG@10 against vectors per document, .png")
    add("--per-query", type=path, metavar="FILE", help="write the metrics of each query, .jsonl or .tsv")
    add(
        "--test",
        choices=["student", "fisher"],
        default="student",
        help="how models are compared: the paired t-test (student), or Fisher's randomisation test",
    )
    add("--json", type=path, metavar="FILE", help="write everything that is printed as JSON")
    add("--batch-size", type=at_least(1), help="texts encoded at once: that of the recipe, or 32")


def run_evaluate(options: argparse.Namespace) -> None:
    from pylate_fastmaxsim.cli.tables import metrics_table, pairs_table
    from pylate_fastmaxsim.recipes.files import files_of_collection, prepare_file
    from pylate_fastmaxsim.recipes.search.evaluate import evaluate
    from pylate_fastmaxsim.recipes.search.run import Options
    from pylate_fastmaxsim.recipes.targets import find_collection, find_targets

    quiet_libraries()
    inputs = (*map(path, [*options.models, *options.dense_models]), options.index, *files_of_collection(options.beir))
    if options.json is not None:
        prepare_file("--json", options.json, inputs)
        if options.per_query is not None and options.per_query.resolve() == options.json.resolve():
            raise RecipeError("--per-query and --json must be two files.")
    settings = from_arguments(Options, options, inputs=inputs)
    targets = find_targets(options.models, options.overrides, options.dense_models)
    with report_interruption(lambda: kept_documents(options.index)):
        name, collection, _ = find_collection(targets, options.beir, options.split)
        with progress_of_tasks() as begin:
            files = {"per_query": options.per_query, "plot": options.plot}
            of_factors = {"test": options.test, "pool_factors": options.pool_factors}
            result = evaluate(targets, name, collection, settings, begin, **files, **of_factors)
        if options.json is not None:
            write_json(options.json, result)
    plain.print(metrics_table(result))
    if result["pairs"]:
        plain.print(pairs_table(result))
    for model in result["models"]:
        print(*(f"{model[place]}\n" for place in ("index", "run") if model[place] is not None), sep="", end="")
