"""``fastmaxsim doctor``: this machine, and whether the texts of a model, a recipe or a script are packed, grouped or padded."""

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import torch

from pylate_fastmaxsim.comparison.gate import keep_warnings
from pylate_fastmaxsim.comparison.script_child import patch_trainers
from pylate_fastmaxsim.integrations.doctor import report
from pylate_fastmaxsim.integrations.enable import disable, status
from pylate_fastmaxsim.integrations.run_script import parse, run_or_exit, script_parser

if TYPE_CHECKING:
    from pylate_fastmaxsim.recipes.config.schema import Recipe

ROWS = 8  # of the batch
# Long and short texts, whose padding is left out.
_MADE_UP = [" ".join(["late interaction keeps a vector for every token"] * count) for count in range(1, ROWS + 1)]
_MOST_ROWS = 512  # that are read of a recipe's data
_NOTHING = "nothing was decided about padding: there was no text of a model that can be encoded without it, or padding_free is off"


def add_doctor_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a model or a recipe, its overrides and ``-v``; a script is read by :func:`doctor_script`."""
    from pylate_fastmaxsim.cli.terminal import add_overrides  # needs rich, which a report on the machine does not

    parser.add_argument(
        "target",
        nargs="?",
        metavar="MODEL_OR_RECIPE_OR_SCRIPT",
        help="of which a first batch is encoded: a folder or name on the Hub, a recipe, or SCRIPT.py ARGS as for run",
    )
    add_overrides(parser)
    _add_verbose(parser)


def _add_verbose(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-v", "--verbose", action="store_true", default=False, help="name each replaced function")


def run_doctor(options: argparse.Namespace) -> None:
    from pylate_fastmaxsim.cli.terminal import quiet_libraries

    quiet_libraries()
    warnings = keep_warnings()
    with tempfile.TemporaryDirectory() as scratch:
        decisions = _first_batch(options.target, options.overrides, scratch)
    _print_report(options.verbose, options.target, decisions, warnings)


def script_doctor_parser(prog: str) -> argparse.ArgumentParser:
    parser = script_parser(prog, "Run a training script until its first batch is encoded, and say how it was.")
    _add_verbose(parser)
    return parser


def doctor_script(arguments: Sequence[str]) -> None:
    """Run a script as ``fastmaxsim run`` does until its first backward, print the report, and end the process."""
    parser = script_doctor_parser("fastmaxsim doctor")
    options, words, as_module = parse(parser, arguments)
    verbose, warnings = options.pop("verbose"), keep_warnings()
    scratch = tempfile.TemporaryDirectory()

    def end() -> NoReturn:
        decisions = status().decisions
        disable()  # what is replaced is no known code; and not before the script, which imports hosts when it wants to
        _print_report(verbose, words[0], decisions, warnings)
        scratch.cleanup()
        os._exit(0)  # so that no `finally` of the script saves a model

    patch_trainers(Path(scratch.name))
    torch.Tensor.backward = lambda *args, **kwargs: end()  # whatever has a gradient has been encoded
    run_or_exit(parser, words, as_module, options)
    end()


def _print_report(verbose: bool, target: str, decisions: list[str], warnings: list[str]) -> None:
    machine = report(verbose)
    others = [line for line in warnings if not any(line in said for said in (machine, *decisions))]
    print(f"{machine}\n\n{target}, first batch", *(decisions + others or [_NOTHING]), sep="\n  ", flush=True)


def _first_batch(target: str, overrides: Sequence[str], scratch: str) -> list[str]:
    """What is decided in one step on a recipe, or on a model with the defaults of one; writes to ``scratch`` only."""
    from datasets import Dataset

    from pylate_fastmaxsim.recipes.config.schema import EvaluationSection
    from pylate_fastmaxsim.recipes.load import is_recipe, load_recipe
    from pylate_fastmaxsim.recipes.models.load import class_of, kind_of, load_model
    from pylate_fastmaxsim.recipes.plugin import plugin_of, reason_against_plugin
    from pylate_fastmaxsim.recipes.training.arguments import ONLY_STEPS, training_arguments
    from pylate_fastmaxsim.recipes.training.inputs import load_data, prepare

    if not is_recipe(target) and class_of(target) == "StaticLateInteraction":
        return ["a StaticLateInteraction looks each token up, there is no padding to leave out"]
    recipe = (load_recipe if is_recipe(target) else _recipe_of_model)(target, overrides, scratch)
    if (reason := reason_against_plugin(recipe.fast)) is not None:
        return [f"as stock has it: {reason}"]
    if recipe.model.visual:
        return ["the encoder of a model of pages runs as stock has it; its scores and losses are accelerated"]
    kind, size = kind_of(recipe.model), min(ROWS, recipe.training.per_device_train_batch_size)
    few = {**ONLY_STEPS, "max_steps": 1, "per_device_train_batch_size": size, "disable_tqdm": True}
    arguments = training_arguments(recipe, kind, **few)
    if is_recipe(target):
        data = replace(recipe.data, max_rows=min(_MOST_ROWS, recipe.data.max_rows or _MOST_ROWS))
        recipe = prepare(replace(recipe, data=data, evaluation=EvaluationSection()))
        rows = load_data(recipe).train
    else:
        rows = Dataset.from_dict({"query": _MADE_UP[::-1], "positive": _MADE_UP})
    model = load_model(recipe.model, arguments.device, recipe.training.seed)
    with plugin_of(recipe.fast), redirect_stdout(sys.stderr):  # on which a trainer prints its log
        kind.build_trainer(recipe.loss, model, rows, arguments).train()
        return status().decisions


def _recipe_of_model(target: str, overrides: Sequence[str], scratch: str) -> "Recipe":
    """A recipe that trains a model, or an encoder, which gets a projection as PyLate gives it one."""
    import sentence_transformers

    from pylate_fastmaxsim.recipes.config.kinds import build_recipe
    from pylate_fastmaxsim.recipes.load import apply_override
    from pylate_fastmaxsim.recipes.models.load import class_of

    late = "multi_vector" if hasattr(sentence_transformers, "MultiVectorEncoder") else "colbert"
    kind = "splade" if class_of(target) == "SparseEncoder" else late
    path = os.path.abspath(os.path.expanduser(target))  # relative, libraries would look for it on the Hub as well
    model = {"kind": kind, "name_or_path": path if os.path.isdir(path) else target}
    values = {"name": target, "output_dir": scratch, "model": model, "data": {"source": "files", "files": ["made up"]}}
    for override in overrides:
        apply_override(values, override)
    if values["model"]["kind"] == "splade":
        values.setdefault("loss", {"regularizers": {"document_weight": 0.0, "query_weight": 0.0}})
    return build_recipe(values)
