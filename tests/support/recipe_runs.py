"""Run recipes in this process: as a command, until an interrupt, and what they have saved."""

import os
import signal
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerCallback

from pylate_fastmaxsim.recipes.models.load import kind_of
from pylate_fastmaxsim.recipes.training.run_directory import last_checkpoint
from pylate_fastmaxsim.recipes.training.train import train
from tests.support.command_line import fastmaxsim


def command(name: str, recipe: Path, *overrides: str, **options):
    """Run ``fastmaxsim NAME RECIPE`` in this process; the result has ``exit_code``, ``stdout`` and ``stderr``."""
    sets = [argument for override in overrides for argument in ("--set", override)]
    return fastmaxsim([name, str(recipe), *sets], **options)


def train_with(recipe, *callbacks: TrainerCallback) -> dict:
    """Train with more callbacks than the recipe's own."""
    kind = kind_of(recipe.model)
    build = kind.build_trainer

    def build_with(*args):
        trainer = build(*args)
        for callback in callbacks:
            trainer.add_callback(callback)
        return trainer

    with mock.patch.object(kind, "build_trainer", build_with):
        return train(recipe)


def interrupt(recipe, step: int) -> str:
    """Train until a Ctrl-C in the middle of a step; the name of the checkpoint that is left."""

    class Interrupt(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == step:
                os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train_with(recipe, Interrupt())
    return last_checkpoint(recipe).name


def same_model(*outputs: Path) -> bool:
    """Whether runs have saved the same weights."""
    first, second = (load_file(output / "model" / "model.safetensors") for output in outputs)
    return all(torch.equal(first[key], second[key]) for key in first)
