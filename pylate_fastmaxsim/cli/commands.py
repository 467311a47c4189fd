"""The commands of ``fastmaxsim``. They import the libraries that they need when called, so that --help is quick."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
import typer.core
from rich.console import Console

import pylate_fastmaxsim
from pylate_fastmaxsim.cli.progress import progress_of_runs, progress_of_tasks
from pylate_fastmaxsim.recipes.config.schema import Recipe
from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.load import load_recipe

BAD_RECIPE = 2
INTERRUPTED = 130


class _Command(typer.core.TyperCommand):
    """A command whose options never take the next option as their value."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:
        rest = super().parse_args(ctx, args)
        for name, given in ctx.params.items():
            for value in given if isinstance(given, (list, tuple)) else [given]:
                if isinstance(value, (str, Path)) and str(value).startswith("--"):
                    raise typer.BadParameter(
                        f"it needs a value, but {value} follows (a path that begins so is ./{value}).",
                        ctx=ctx,
                        param=next(parameter for parameter in self.params if parameter.name == name),
                    )
        return rest


class _Commands(typer.Typer):
    def command(self, *args: Any, **kwargs: Any) -> Callable:
        return super().command(*args, cls=_Command, **kwargs)


app = _Commands(
    name="fastmaxsim",
    help="Train late-interaction and SPLADE models without padding, similarity tensors and vocabulary logits.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
# Brackets and colons in names and paths are neither markup nor emoji.
errors = Console(stderr=True, soft_wrap=True, emoji=False)
plain = Console(markup=False, emoji=False)

RecipePath = Annotated[
    Path,
    typer.Argument(
        metavar="RECIPE",
        help="A recipe: a .yaml file, or the name of one that comes with the package (fastmaxsim recipes).",
        show_default=False,
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override a key of the recipe, for example training.max_steps=100. May be given several times.",
    ),
]


def quiet_libraries() -> None:
    """Hide the progress bars and log lines of other libraries."""
    import logging

    from datasets import disable_progress_bars
    from transformers.utils import logging as transformers_logging

    disable_progress_bars()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    logging.getLogger("pylate.models.colbert").setLevel(logging.ERROR)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"pylate-fastmaxsim {pylate_fastmaxsim.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


def end_with(sentence: str, code: int = 1) -> NoReturn:
    errors.print(sentence, style="red", markup=False, highlight=False)
    raise typer.Exit(code) from None


def end_interrupted(kept: str | None = None) -> NoReturn:
    # Ctrl-C reaches every process of a launcher; only the first reports it.
    if int(os.environ.get("RANK", "0")) == 0:
        errors.print(f"\nInterrupted: {kept}." if kept else "\nInterrupted.", markup=False)
    raise typer.Exit(INTERRUPTED) from None


@contextmanager
def one_sentence_instead_of_a_traceback():
    """End with one sentence after a RecipeError, or after an interrupt before anything was saved."""
    try:
        yield
    except RecipeError as error:
        end_with(f"fastmaxsim: {error}", BAD_RECIPE)
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        end_with(f"fastmaxsim: {error.filename} cannot be reached: {error.strerror}.", BAD_RECIPE)
    except KeyboardInterrupt:
        end_interrupted()


# What safetensors and other libraries say of a full disk, a quota or a limit of the size of files, and what torch says of any
# file that it cannot write to its end.
_FULL_DISK = re.compile(r"No space left on device|\(os error (27|28|122)\)")
_NOT_WRITTEN = re.compile(r"PytorchStreamWriter failed writing|unexpected pos \d+ vs \d+")


@contextmanager
def one_sentence_for_a_full_disk(kept: Callable[[], str]):
    """``kept`` says what is left."""
    try:
        yield
    except RecipeError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            reason = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
        elif _FULL_DISK.search(str(error)):
            reason = next(line.strip().rstrip(".") for line in str(error).splitlines() if _FULL_DISK.search(line))
        elif _NOT_WRITTEN.search(str(error)):
            reason = "a file cannot be written to its end, as on a full disk"
        else:
            raise
        end_with(f"\nfastmaxsim: {reason}; {kept()}.")


@contextmanager
def one_sentence_for_too_little_memory(recipe: Recipe):
    try:
        yield
    except Exception as error:
        from pylate_fastmaxsim._memory import is_out_of_memory
        from pylate_fastmaxsim.recipes.training.run_directory import last_checkpoint

        if not is_out_of_memory(error):
            raise
        advice = _take_less_memory(recipe, last_checkpoint(recipe))
        end_with(f"\nfastmaxsim: out of memory; {advice}.")


def _take_less_memory(recipe: Recipe, checkpoint: Path | None) -> str:
    """How to use less memory: first without, then with an effect on what is learned."""
    free, length = [], recipe.model.length
    lower = [f"model.{length}"] if length else []
    if not recipe.training.gradient_checkpointing:
        free.append("set training.gradient_checkpointing to true")
    if recipe.loss.name == "cached_contrastive" or recipe.loss.mini_batch_size is not None:
        by_tokens = recipe.loss.mini_batch_num_tokens is not None
        free.append(f"lower loss.{'mini_batch_num_tokens' if by_tokens else 'mini_batch_size'}")
    else:
        lower = ["training.per_device_train_batch_size", *lower]
    options = [" or ".join(free)] if free else []
    options.append(f"lower {' or '.join(lower)}")
    if checkpoint is None:
        return f"{', or '.join(options)}; there is no checkpoint yet"
    if free:
        options[0] += " and go on from there"
    options[-1] += " and start over, with --no-resume or another output_dir"
    return f"{checkpoint} is kept: {', or '.join(options)}"


def _again(resume: bool) -> str:
    """The command that goes on: --no-resume would remove what is kept."""
    return "the same command" if resume else "the same command without --no-resume"


@app.command()
def train(
    recipe: RecipePath,
    set_: Overrides = None,
    resume: Annotated[
        bool,
        typer.Option(
            help="Go on from the last checkpoint in output_dir; --no-resume deletes its checkpoints and starts over."
        ),
    ] = True,
) -> None:
    """Train the model of a recipe, with checkpoints, and save it."""
    with one_sentence_instead_of_a_traceback():
        loaded = load_recipe(recipe, set_ or ())
        from pylate_fastmaxsim.recipes.tables import training_table
        from pylate_fastmaxsim.recipes.training.run_directory import last_checkpoint
        from pylate_fastmaxsim.recipes.training.train import train as run

        def kept() -> str:
            checkpoint = last_checkpoint(loaded)
            if checkpoint is None:
                return "there is no checkpoint yet, and the same command starts again"
            return f"{checkpoint} is kept, and {_again(resume)} goes on from there"

        quiet_libraries()
        try:
            with one_sentence_for_a_full_disk(kept), one_sentence_for_too_little_memory(loaded):
                result = run(loaded, resume)
        except KeyboardInterrupt:
            end_interrupted(kept())
    if "ndcg@10" in result:  # the main process of a distributed run
        plain.print(training_table(result))


@app.command()
def mine(
    recipe: RecipePath,
    set_: Overrides = None,
    resume: Annotated[
        bool, typer.Option(help="Go on from where mining stopped; --no-resume starts over and replaces its results.")
    ] = True,
) -> None:
    """Find hard negatives for a recipe's pairs, score them with its teacher, and write training data."""
    with one_sentence_instead_of_a_traceback():
        loaded = load_recipe(recipe, set_ or ())
        from accelerate import PartialState

        from pylate_fastmaxsim.recipes.mining.mine import mine as run
        from pylate_fastmaxsim.recipes.tables import mining_table

        kept = f"what is done is kept, and {_again(resume)} goes on from there"
        quiet_libraries()
        try:
            with one_sentence_for_a_full_disk(lambda: kept):
                result = run(loaded, resume)
        except KeyboardInterrupt:
            end_interrupted(kept)
    if PartialState().is_main_process:
        plain.print(mining_table(result))


@app.command()
def compare(
    recipe: RecipePath,
    set_: Overrides = None,
    output: Annotated[
        str | None, typer.Option(metavar="DIR", help="Folder for the results, in place of the recipe's output_dir.")
    ] = None,
    sweep: Annotated[
        str | None,
        typer.Option(
            metavar="batch_size=N,N,...",
            help="Also measure a few steps at each of these batch sizes, until memory runs out.",
        ),
    ] = None,
) -> None:
    """Train a recipe with the stock library and with this package, and compare them.

    So is a training script, for some steps: fastmaxsim compare train.py ARGS.
    """
    with one_sentence_instead_of_a_traceback():
        # As output_dir of the recipe, so that ~ in --output=~/dir is expanded.
        loaded = load_recipe(recipe, set_ or (), output)
        from pylate_fastmaxsim.comparison.report import show_comparison, write_comparison_page, write_comparison_png
        from pylate_fastmaxsim.recipes.comparison.compare import RESULT_FILE, RunFailed, parse_sweep
        from pylate_fastmaxsim.recipes.comparison.compare import compare as run

        batch_sizes = parse_sweep(sweep) if sweep is not None else []
        result = Path(loaded.output_dir, RESULT_FILE)
        steps = f"the steps of each run are in {result.parent / 'compare'}"
        quiet_libraries()
        try:
            with one_sentence_for_a_full_disk(lambda: steps):
                with progress_of_runs() as on_progress:
                    comparison = run(loaded, on_progress, batch_sizes)
                # Before anything that may fail, because measuring took long.
                show_comparison(comparison, plain.print, _print_warning)
                write_comparison_png(comparison, result.with_suffix(".png"))
                write_comparison_page(comparison, result.with_suffix(".html"))
        except RunFailed as error:
            end_with(f"fastmaxsim: {error}")
        except KeyboardInterrupt:
            end_interrupted("a comparison is not resumed, the same command starts it again")
    typer.echo("\n".join(str(result.with_suffix(suffix)) for suffix in (".json", ".png", ".html")))


def _print_warning(warning: str) -> None:
    errors.print(warning, style="yellow", markup=False, highlight=False)


@app.command()
def robustness(
    target: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE_OR_MODEL",
            help="A recipe (.yaml, or a name of fastmaxsim recipes) whose model is trained, or a model of texts: its folder or "
            "its name on the Hub.",
            show_default=False,
        ),
    ],
    set_: Overrides = None,
    beir: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER_OR_NAME",
            help="A collection in BEIR's layout, in place of the recipe's held-out data; a model needs one.",
        ),
    ] = None,
    split: Annotated[str, typer.Option(help="The split of its judgements.")] = "test",
    pooling: Annotated[
        list[str] | None,
        typer.Option(
            metavar="POOLING",
            help="max, top_k=K, softmax=T or log_sum_exp=T. May be given several times; in place of the first four.",
        ),
    ] = None,
    times: Annotated[str, typer.Option(metavar="N,N,...", help="How many times as long documents become.")] = "1,2,4,8",
    tokens: Annotated[
        str, typer.Option(metavar="K,K,...", help="How many tokens are injected.")
    ] = "0,25,50,100,200,400",
    append: Annotated[
        str,
        typer.Option(help="What makes documents longer: text, tokens (embeddings), or auto for what the model can."),
    ] = "auto",
    noise: Annotated[float, typer.Option(min=0, help="How far injected tokens are from those of the query.")] = 0.5,
    max_queries: Annotated[int, typer.Option(min=1, help="Of more queries some are drawn.")] = 300,
    max_documents: Annotated[
        int, typer.Option(min=1, help="Of more documents some are drawn beside gold ones.")
    ] = 2000,
    seed: Annotated[int, typer.Option(min=0, help="Of all draws.")] = 0,
    output: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Folder for the results: the recipe's output_dir, or here for a model."),
    ] = None,
) -> None:
    """Measure a trained model on longer documents and on documents with injected tokens, by several poolings."""
    with one_sentence_instead_of_a_traceback():
        from pylate_fastmaxsim.recipes.robustness.measure import settings_of
        from pylate_fastmaxsim.recipes.robustness.report import tables, write_robustness_page, write_robustness_png
        from pylate_fastmaxsim.recipes.robustness.run import robustness as run
        from pylate_fastmaxsim.recipes.robustness.task import Limits

        settings = settings_of(pooling or (), times, tokens, append, noise, seed)
        limits = Limits(max_queries, max_documents, seed)
        quiet_libraries()
        with one_sentence_for_a_full_disk(lambda: "the same command starts again"):
            result, pairs, file = run(target, settings, limits, set_ or (), beir, split, output)
            for table in tables(result):
                plain.print(table)
            write_robustness_png(result, file.with_suffix(".png"))
            write_robustness_page(result, pairs, file.with_suffix(".html"))
    typer.echo("\n".join(str(file.with_suffix(suffix)) for suffix in (".json", ".png", ".html")))


@app.command()
def search(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A ColBERT of PyLate, a MultiVectorEncoder or SparseEncoder of Sentence Transformers, by its folder or its "
            "name on the Hub, or the folder of a StaticLateInteraction.",
            show_default=False,
        ),
    ],
    beir: Annotated[
        str | None, typer.Option(metavar="FOLDER_OR_NAME", help="A collection in BEIR's layout; its judged queries.")
    ] = None,
    split: Annotated[str, typer.Option(help="The split of its judgements.")] = "test",
    corpus: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Documents, .jsonl or .parquet, with _id, text and perhaps title."),
    ] = None,
    queries: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Queries, .jsonl or .parquet, with _id and text.")
    ] = None,
    qrels: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Judgements, as in BEIR or TREC, for metrics of these queries.")
    ] = None,
    k: Annotated[int, typer.Option("--k", min=1, help="Results of each query.")] = 1000,
    run: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the results as a TREC run file.")] = None,
    index: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Keep the encoded documents here: an interrupted command goes on, a further one encodes none.",
        ),
    ] = None,
    format_: Annotated[
        str | None,
        typer.Option(
            "--format",
            help="Of token embeddings in the index: float32 (the default), bfloat16, float16, int8, fp8, residual-1, "
            "residual-2 or residual-4.",
        ),
    ] = None,
    plaid: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Search all that this index of PLAID stores, in place of encoded documents, and say how much of the best "
            "its own search finds.",
        ),
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Texts encoded at once.")] = 32,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code that comes with the model.")
    ] = False,
    exact: Annotated[
        bool, typer.Option(help="Rank a static model by MaxSim, or by the upper bounds of its sparse vectors.")
    ] = True,
    json_: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write metrics and times as JSON.")
    ] = None,
) -> None:
    """Search a collection exactly with a late-interaction or sparse model: a run file, metrics and times."""
    with one_sentence_instead_of_a_traceback():
        from pylate_fastmaxsim.recipes.files import files_of_collection, prepare_file, write_json
        from pylate_fastmaxsim.recipes.search.run import Options
        from pylate_fastmaxsim.recipes.search.run import search as run_search
        from pylate_fastmaxsim.recipes.tables import search_table
        from pylate_fastmaxsim.recipes.targets import load_inputs

        # The shell leaves ~ in --run=~/file as it is.
        files = (corpus, queries, qrels, run, index, plaid, json_)
        files = (path if path is None else path.expanduser() for path in files)
        corpus, queries, qrels, run, index, plaid, json_ = files
        kept = "documents are kept with --index only, and the same command starts again"
        if index is not None:
            kept = f"what is encoded is kept in {index}, and the same command goes on from there"
        inputs = (Path(model).expanduser(), corpus, queries, qrels, index, plaid, *files_of_collection(beir))
        options = Options(k, run, index, format_, batch_size, trust_remote_code, exact, plaid, inputs=inputs)
        quiet_libraries()
        if json_ is not None:
            prepare_file("--json", json_, inputs)
            if run is not None and run.resolve() == json_.resolve():
                raise RecipeError("--run and --json must be two files.")
        try:
            with one_sentence_for_a_full_disk(lambda: kept), progress_of_tasks() as begin:
                result = run_search(model, load_inputs(beir, split, corpus, queries, qrels), options, begin)
                if json_ is not None:
                    write_json(json_, result)
        except KeyboardInterrupt:
            end_interrupted(kept)
    plain.print(search_table(result))


@app.command()
def warmup(recipe: RecipePath, set_: Overrides = None) -> None:
    """Compile the kernels of a recipe ahead of time, so that training does not wait for them (CUDA GPU)."""
    with one_sentence_instead_of_a_traceback():
        loaded = load_recipe(recipe, set_ or ())
        from pylate_fastmaxsim.precompile.recipe import nothing_to_compile, warm_up

        if reason := nothing_to_compile(loaded):
            typer.echo(reason)
            return
        quiet_libraries()
        with Console(stderr=True, emoji=False).status("compiling, then training two steps on each size of batch"):
            warmed = warm_up(loaded)
    plain.print(warmed.table(loaded.name))
    typer.echo(warmed.counts())
