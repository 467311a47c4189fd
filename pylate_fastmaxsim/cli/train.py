"""``fastmaxsim train``: train the model of a recipe."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pylate_fastmaxsim.cli.terminal import add_recipe, add_resume, end_with, plain, quiet_libraries, report_interruption
from pylate_fastmaxsim.recipes.config.schema import Recipe
from pylate_fastmaxsim.recipes.load import load_recipe


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a recipe, its overrides and ``--resume``."""
    add_recipe(parser)
    add_resume(
        parser, "go on from the last checkpoint in output_dir; --no-resume deletes its checkpoints and starts over"
    )


def run(options: argparse.Namespace) -> None:
    """Train, and print a table of the metrics."""
    recipe = load_recipe(options.recipe, options.overrides)
    from pylate_fastmaxsim.recipes.tables import training_table
    from pylate_fastmaxsim.recipes.training.run_directory import last_checkpoint
    from pylate_fastmaxsim.recipes.training.train import train

    def kept() -> str:
        checkpoint = last_checkpoint(recipe)
        if checkpoint is None:
            return "there is no checkpoint yet, and the same command starts again"
        return f"{checkpoint} is kept, and {command_to_resume(options.resume)} goes on from there"

    quiet_libraries()
    with report_interruption(kept), _report_out_of_memory(recipe):
        result = train(recipe, options.resume)
    if "ndcg@10" in result:  # the main process of a distributed run
        plain.print(training_table(result))


def command_to_resume(resume: bool) -> str:
    """The command that goes on: --no-resume would remove what is kept."""
    return "the same command" if resume else "the same command without --no-resume"


@contextmanager
def _report_out_of_memory(recipe: Recipe) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        from pylate_fastmaxsim._memory import is_out_of_memory
        from pylate_fastmaxsim.recipes.training.run_directory import last_checkpoint

        if not is_out_of_memory(error):
            raise
        end_with(f"\nfastmaxsim: out of memory; {advice_on_memory(recipe, last_checkpoint(recipe))}.")


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
