"""``fastmaxsim evaluate``: metrics of trained models on a collection, and whether they differ."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from pylate_fastmaxsim.cli.commands import (
    Overrides,
    app,
    end_interrupted,
    one_sentence_for_a_full_disk,
    one_sentence_instead_of_a_traceback,
    plain,
    quiet_libraries,
)
from pylate_fastmaxsim.cli.progress import progress_of_tasks
from pylate_fastmaxsim.recipes.errors import RecipeError


class PairedTest(str, Enum):
    """How models are compared."""

    student = "student"
    fisher = "fisher"


@app.command()
def evaluate(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL_OR_RECIPE...",
            help="Models, as for search, and recipes (.yaml, or names of fastmaxsim recipes) whose models are trained.",
            show_default=False,
        ),
    ],
    set_: Overrides = None,
    beir: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER_OR_NAME", help="A collection in BEIR's layout, in place of what the recipe is evaluated on."
        ),
    ] = None,
    split: Annotated[str, typer.Option(help="The split of its judgements.")] = "test",
    index: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Keep the encoded documents here, of each model in a folder of its own: an interrupted command goes on, a "
            "further one encodes none.",
        ),
    ] = None,
    format_: Annotated[
        str | None, typer.Option("--format", help="Of token embeddings in the index, as for search.")
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write the results of each model as a TREC run file in this folder."),
    ] = None,
    per_query: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the metrics of each query, .jsonl or .tsv.")
    ] = None,
    test: Annotated[
        PairedTest, typer.Option(help="How models are compared: the paired t-test, or Fisher's randomisation test.")
    ] = PairedTest.student,
    json_: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write everything that is printed as JSON.")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Texts encoded at once: that of the recipe, or 32.", show_default=False)
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code that comes with a model.")
    ] = False,
) -> None:
    """Evaluate trained models on a collection by exact search, and compare them."""
    with one_sentence_instead_of_a_traceback():
        from pylate_fastmaxsim.recipes.files import files_of_collection, prepare_file, write_json
        from pylate_fastmaxsim.recipes.search.evaluate import Options
        from pylate_fastmaxsim.recipes.search.evaluate import evaluate as run_evaluation
        from pylate_fastmaxsim.recipes.tables import metrics_table, pairs_table
        from pylate_fastmaxsim.recipes.targets import find_collection, find_targets

        # The shell leaves ~ in --run=~/runs as it is.
        index, run, per_query, json_ = (path and path.expanduser() for path in (index, run, per_query, json_))
        kept = "documents are kept with --index only, and the same command starts again"
        if index is not None:
            kept = f"what is encoded is kept in {index}, and the same command goes on from there"
        quiet_libraries()
        inputs = (*(Path(name).expanduser() for name in models), index, *files_of_collection(beir))
        if json_ is not None:
            prepare_file("--json", json_, inputs)
            if per_query is not None and per_query.resolve() == json_.resolve():
                raise RecipeError("--per-query and --json must be two files.")
        options = Options(run, per_query, index, format_, batch_size, trust_remote_code, test.value, inputs)
        targets = find_targets(models, set_ or ())
        try:
            name, collection = find_collection(targets, beir, split)
            with one_sentence_for_a_full_disk(lambda: kept), progress_of_tasks() as begin:
                result = run_evaluation(targets, name, collection, options, begin)
                if json_ is not None:
                    write_json(json_, result)
        except KeyboardInterrupt:
            end_interrupted(kept)
    plain.print(metrics_table(result))
    if result["pairs"]:
        plain.print(pairs_table(result))
    for model in result["models"]:
        for place in ("index", "run"):
            if model[place] is not None:
                typer.echo(model[place])
