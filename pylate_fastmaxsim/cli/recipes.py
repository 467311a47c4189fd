"""Commands that take a recipe: list and copy, train, compare, mine, and compile ahead of time."""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pylate_fastmaxsim.cli.terminal import (
    add_overrides,
    end_with,
    errors,
    path,
    plain,
    quiet_libraries,
    report_interruption,
)
from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.load import copy_recipe, describe, shipped_recipe, shipped_recipes

if TYPE_CHECKING:
    from pylate_fastmaxsim.precompile.shapes import BatchShape
    from pylate_fastmaxsim.recipes.config.schema import Recipe

SHAPE = "128x32x256x300[,dim=96,dtype=float16,formats=int8+fp8,xtr=8]"


def add_recipes_arguments(parser: argparse.ArgumentParser) -> None:
    what = "list them (the default), show one, copy one, or print a JSON schema for editors"
    parser.add_argument("what", nargs="?", choices=["list", "show", "copy", "schema"], default="list", help=what)
    parser.add_argument("name", nargs="?", metavar="NAME", help="the name of one")
    parser.add_argument("folder", nargs="?", metavar="FOLDER", type=path, default=path(""), help="where to (here)")


def run_recipes(options: argparse.Namespace) -> None:
    if options.what == "schema":
        from pylate_fastmaxsim.recipes.json_schema import json_schema

        print(json.dumps(json_schema(), indent=2))
        return
    files = shipped_recipes()
    if options.what != "list":
        if options.name is None:
            raise RecipeError(f"recipes {options.what} needs the name of a recipe; the package has {', '.join(files)}.")
        if options.what == "show":
            print(shipped_recipe(options.name).read_text(encoding="utf-8"), end="")
        else:
            print(copy_recipe(options.name, options.folder))
        return
    width = max(map(len, files))
    for name, file in files.items():
        print(f"{name:{width}}  {describe(file)}")


def add_train_arguments(parser: argparse.ArgumentParser) -> None:
    _add_recipe(parser)
    _add_resume(
        parser, "go on from the last checkpoint in output_dir; --no-resume deletes its checkpoints and starts over"
    )


def run_train(options: argparse.Namespace) -> None:
    recipe = _load(options)
    from pylate_fastmaxsim._memory import is_out_of_memory
    from pylate_fastmaxsim.cli.tables import begun_table, training_table
    from pylate_fastmaxsim.recipes.training.run_directory import last_checkpoint
    from pylate_fastmaxsim.recipes.training.train import train

    def kept() -> str:
        checkpoint = last_checkpoint(recipe)
        if checkpoint is None:
            return "there is no checkpoint yet, and the same command starts again"
        return f"{checkpoint} is kept, and {command_to_resume(options.resume)} goes on from there"

    quiet_libraries()
    with report_interruption(kept):
        try:
            result = train(recipe, options.resume, lambda summary: plain.print(begun_table(summary)))
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            end_with(f"\nfastmaxsim: out of memory; {advice_on_memory(recipe, last_checkpoint(recipe))}.")
    if "ndcg@10" in result:  # the main process of a distributed run
        plain.print(training_table(result))


def advice_on_memory(recipe: Recipe, checkpoint: Path | None) -> str:
    """A clause that says how to use less memory: first without, then with an effect on what is learned."""
    free, length = [], recipe.model.length
    lower = [f"model.{length}"] if length else []
    if not recipe.training.gradient_checkpointing:
        free.append("set training.gradient_checkpointing to true")
    if recipe.loss.name == "cached_contrastive" or recipe.loss.mini_batch_size is not None:
        by_tokens = recipe.loss.mini_batch_num_tokens is not None
        free.append(f"lower loss.{'mini_batch_num_tokens' if by_tokens else 'mini_batch_size'}")
    else:
        lower = ["training.per_device_train_batch_size", *lower]
    advice = [" or ".join(free)] if free else []
    advice.append(f"lower {' or '.join(lower)}")
    if checkpoint is None:
        return f"{', or '.join(advice)}; there is no checkpoint yet"
    if free:
        advice[0] += " and go on from there"
    advice[-1] += " and start over, with --no-resume or another output_dir"
    return f"{checkpoint} is kept: {', or '.join(advice)}"


def add_mine_arguments(parser: argparse.ArgumentParser) -> None:
    _add_recipe(parser)
    _add_resume(parser, "go on from where mining stopped; --no-resume starts over and replaces its results")


def run_mine(options: argparse.Namespace) -> None:
    recipe = _load(options)
    from accelerate import PartialState

    from pylate_fastmaxsim.cli.tables import mining_table
    from pylate_fastmaxsim.recipes.mining.mine import mine

    quiet_libraries()
    with report_interruption(
        lambda: f"what is done is kept, and {command_to_resume(options.resume)} goes on from there"
    ):
        result = mine(recipe, options.resume)
    if PartialState().is_main_process:
        plain.print(mining_table(result))


def command_to_resume(resume: bool) -> str:
    """The command that goes on: --no-resume would remove what is kept."""
    return "the same command" if resume else "the same command without --no-resume"


def add_compare_arguments(parser: argparse.ArgumentParser) -> None:
    _add_recipe(parser)
    parser.add_argument("--output", metavar="DIR", help="folder for the results, in place of the recipe's output_dir")
    parser.add_argument(
        "--sweep",
        metavar="batch_size=N,N,...",
        help="also measure a few steps at each of these batch sizes, until memory runs out",
    )


def run_compare(options: argparse.Namespace) -> None:
    recipe = _load(options)
    from pylate_fastmaxsim.comparison.report import RESULT_FILE, publish
    from pylate_fastmaxsim.recipes.comparison.compare import RunFailed, compare, parse_sweep

    batch_sizes = parse_sweep(options.sweep) if options.sweep is not None else []
    result = Path(recipe.output_dir, RESULT_FILE)
    steps = f"the steps of each run are in {result.parent / 'compare'}"
    quiet_libraries()
    try:
        with report_interruption(lambda: steps, "a comparison is not resumed, the same command starts it again"):
            publish(compare(recipe, batch_sizes), result)
    except RunFailed as error:
        end_with(f"fastmaxsim: {error}")


def add_warmup_arguments(parser: argparse.ArgumentParser) -> None:
    _add_recipe(parser, nargs="?")
    meaning = (
        "in place of a recipe: queries x tokens x documents x tokens, then other fields of a BatchShape; repeatable"
    )
    parser.add_argument("--shape", action="append", metavar=SHAPE, help=meaning)


def run_warmup(options: argparse.Namespace) -> None:
    if (options.recipe is None) == (options.shape is None):
        raise RecipeError("warmup needs a RECIPE, or sizes as --shape " + SHAPE + ".")
    if options.shape is not None:
        from pylate_fastmaxsim.precompile.processes import warmup

        shapes = [*map(_shape, options.shape)]
        try:
            made = warmup(shapes)
        except RuntimeError as error:
            raise RecipeError(str(error)) from None
        print(f"{made.kernels} new kernels in Triton's cache, by {made.processes} processes in {made.seconds:.0f} s.")
        return
    recipe = _load(options)
    from pylate_fastmaxsim.precompile.recipe import reason_against_warmup, warm_up

    if reason := reason_against_warmup(recipe):
        print(reason)
        return
    quiet_libraries()
    with errors.status("compiling, then training two steps on each size of batch"):
        warmed = warm_up(recipe)
    plain.print(warmed.table(recipe.name))
    print(warmed.counts())


def _shape(text: str) -> BatchShape:
    import torch

    from pylate_fastmaxsim.precompile.shapes import BatchShape

    sizes, *more = text.split(",")
    try:
        given = dict(each.split("=") for each in more)
        numbers = [int(each) for each in sizes.split("x")]
        parse = {"dtype": partial(getattr, torch), "formats": lambda names: tuple(names.split("+"))}
        return BatchShape(*numbers, **{name: parse.get(name, int)(value) for name, value in given.items()})
    except (ValueError, TypeError, AttributeError) as error:
        why = f" ({error})" if str(error).startswith("BatchShape:") else ""
        raise RecipeError(f"--shape {text}: write it as {SHAPE}{why}.") from None


def _add_recipe(parser: argparse.ArgumentParser, nargs: str | None = None) -> None:
    parser.add_argument(
        "recipe",
        nargs=nargs,
        metavar="RECIPE",
        help="a recipe: a .yaml file, or the name of one that comes with the package (fastmaxsim recipes)",
    )
    add_overrides(parser)


def _add_resume(parser: argparse.ArgumentParser, meaning: str) -> None:
    parser.add_argument("--resume", action=argparse.BooleanOptionalAction, default=True, help=meaning)


def _load(options: argparse.Namespace) -> Recipe:
    """The recipe of a command with its overrides; ``--output`` is its output_dir, so that ~ is expanded."""
    from pylate_fastmaxsim.recipes.load import load_recipe  # takes seconds, which a list of recipes need not

    return load_recipe(options.recipe, options.overrides, getattr(options, "output", None))
