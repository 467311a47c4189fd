"""One of the two runs of a training script that is compared, in a process of its own.

A step is one of the optimizer. transformers' Trainer is given a callback; in any other loop the optimizer that steps
first is gate. The process is ended behind the last measured step, so that the script saves nothing.
"""

import argparse
import math
import os
import random
import sys
import traceback
from collections.abc import Callable, Mapping
from functools import partial, wraps
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import numpy
import torch
from torch.optim import optimizer as optimizers

from pylate_fastmaxsim._memory import is_out_of_memory
from pylate_fastmaxsim.comparison.gate import Gate, current_device, keep_warnings
from pylate_fastmaxsim.comparison.trainer import count_tokens, embeddings_of, measure_steps
from pylate_fastmaxsim.comparison.turns import FINISHED, OUT_OF_MEMORY
from pylate_fastmaxsim.comparison.verdict import FAST, STOCK
from pylate_fastmaxsim.integrations.enable import status as state
from pylate_fastmaxsim.integrations.run_script import (
    AfterImport,
    parse,
    run_accelerated,
    run_as_main,
    script_parser,
    show_log,
    traceback_of,
    warn_if_nothing_was_accelerated,
)
from pylate_fastmaxsim.reporting.environment import environment

STEPS = 30
# The file in the folder of a run that holds what the script said when it failed.
FAILURE = "failure"
FEWEST_STEPS = 6


class ScriptGate(Gate):
    """The gate of a script, whose process ends after ``steps`` steps and reports the ``warnings`` of the package."""

    def __init__(self, pipe: Connection, script: str, steps: int, warnings: list[str]) -> None:
        super().__init__(pipe)
        self.script = script
        self.steps = steps
        self.warnings = warnings
        self.taken = 0

    def after_step(self, **measured: Any) -> None:
        """Count a step; may block, and does not return after the last one."""
        self.taken += 1
        super().after_step(**measured | {"of": self.steps})
        if self.taken == self.steps:
            self.finish()

    def steps_done(self) -> None:
        """End with the training, unless it had no step."""
        if self.taken:
            self.finish()

    def finish(self, status: str = FINISHED) -> NoReturn:
        """Report the result, and wait until the parent ends this process."""
        warn_if_nothing_was_accelerated(self.script)
        if status == FINISHED and self.taken < self.steps:
            self.warnings.append(f"training ended after {self.taken} of {self.steps} steps.")
        _flush()
        said = {"warnings": self.warnings, "decisions": state().decisions}
        self.finished(status=status, environment=environment(current_device()), **said)
        self.wait_for_end()


def _flush() -> None:
    """Write what was printed, before this process is ended from outside or by ``os._exit``."""
    sys.stdout.flush()
    sys.stderr.flush()


class LoopWatch:
    """Measures a loop of the script's own by the optimizer that steps first, until a Trainer trains.

    The loss of a step is the last scalar whose ``backward`` was called, outside of any other backward.
    """

    def __init__(self, gate: ScriptGate) -> None:
        self.gate = gate
        self.first: int | None = None
        self.trainer = False
        self.loss: torch.Tensor | None = None
        self.inside = False
        optimizers.register_optimizer_step_pre_hook(self._before)
        optimizers.register_optimizer_step_post_hook(self._after)
        self._patch_backward()

    def _before(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self.first is None and not self.trainer:
            self.first = id(optimizer)
            self.gate.before_step()

    def _after(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if id(optimizer) == self.first and not self.trainer:
            self.gate.after_step(**({} if self.loss is None else {"loss": self.loss}))

    def _patch_backward(self) -> None:
        backward, scale = torch.Tensor.backward, torch.amp.GradScaler.scale

        @wraps(backward)
        def kept(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            if self.inside or tensor.numel() != 1:
                backward(tensor, *args, **kwargs)
                return
            self.inside = True
            try:
                backward(tensor, *args, **kwargs)
            finally:
                self.inside = False
            self.loss = getattr(tensor, "before_scaling", tensor).detach()

        @wraps(scale)
        def scaled(scaler: torch.amp.GradScaler, outputs: Any) -> Any:
            result = scale(scaler, outputs)
            if isinstance(result, torch.Tensor):
                result.before_scaling = outputs
            return result

        torch.Tensor.backward, torch.amp.GradScaler.scale = kept, scaled


def patch_trainers(folder: Path, before_training: Callable[[Any], None] = lambda trainer: None) -> None:
    """Have transformers' Trainer write into ``folder``, report to nobody and begin anew, from when it is imported."""
    fixed = {
        "output_dir": str(folder / "output"),
        "push_to_hub": False,
        "report_to": [],
        "eval_on_start": False,
        "auto_find_batch_size": False,
    }

    def change(module: ModuleType) -> None:
        if module.__name__ == "transformers.training_args":
            for name, value in fixed.items():
                # Whatever a script sets, also after it has made them.
                read_only = property(lambda self, value=value: value, lambda self, given: None)
                setattr(module.TrainingArguments, name, read_only)
            return
        train = module.Trainer.train

        @wraps(train)
        def patched_train(self: Any, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
            before_training(self)
            return train(self, None, *args, **kwargs)

        module.Trainer.train = patched_train

    os.environ["WANDB_MODE"] = "disabled"
    sys.meta_path.insert(0, AfterImport(("transformers.trainer", "transformers.training_args"), change))


def _lengthen_training(trainer: Any, steps: int) -> None:
    """Have a training that would be shorter last for ``steps``; of a longer one the learning rates stay as they are."""
    arguments = trainer.args
    if arguments.max_steps > 0:
        arguments.max_steps = max(arguments.max_steps, steps)
        return
    data = trainer.train_dataset
    try:
        rows = sum(map(len, data.values())) if isinstance(data, Mapping) else len(data)
    except TypeError:  # streamed, or made by a method of the user's own
        return
    batch = arguments.train_batch_size * arguments.world_size * arguments.gradient_accumulation_steps
    if math.floor(arguments.num_train_epochs * rows / batch) < steps:
        arguments.max_steps = steps


def script_comparison_parser(prog: str) -> argparse.ArgumentParser:
    """The options of ``fastmaxsim compare SCRIPT.py``."""
    parser = script_parser(prog, "Compare a training script with and without pylate-fastmaxsim.")
    parser.add_argument(
        "--steps", type=_steps, default=STEPS, help=f"optimizer steps of each run, from {FEWEST_STEPS} ({STEPS})"
    )
    parser.add_argument("--output", metavar="DIR", default="compare", help="folder for the results (compare)")
    return parser


def _steps(text: str) -> int:
    if not text.isdecimal() or int(text) < FEWEST_STEPS:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least {FEWEST_STEPS}, got {text!r}")
    return int(text)


def _exit_with(folder: Path, said: str, code: int) -> NoReturn:
    """End as the script would: the parent repeats what it said, without the rest of its log."""
    (folder / FAILURE).write_text(said, encoding="utf-8")
    print(said, end="", file=sys.stderr)
    _flush()
    os._exit(code)


def main() -> None:
    """Run the script of the command line: which of the two runs it is, a folder to write into, the command's words."""
    mode, folder, *arguments = sys.argv[1:]
    folder = Path(folder)
    options, words, as_module = parse(script_comparison_parser("fastmaxsim compare"), arguments)
    steps, _ = options.pop("steps"), options.pop("output")
    warnings = keep_warnings() if mode == FAST else []
    os.environ["PYLATE_FASTMAXSIM"] = "1" if mode == FAST else "0"
    gate = ScriptGate.from_environment(words[0], steps, warnings)
    loop = LoopWatch(gate)

    def measure(trainer: Any) -> None:
        loop.trainer = True
        _lengthen_training(trainer, steps)
        # A ColBERT of PyLate encodes its queries with padding, also without that of documents.
        padded = mode == STOCK or hasattr(trainer.model, "do_query_expansion")
        # With hooks in the encoder no CUDA graphs are recorded.
        embeddings = None if mode == FAST and options.get("compile") else embeddings_of(trainer.model)
        measure_steps(trainer, gate, partial(count_tokens, padded=padded, encoded=False), embeddings)

    patch_trainers(folder, measure)
    show_log()
    # What a script draws without a seed of its own, both runs draw alike.
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
    try:
        if mode == FAST:
            run_accelerated(words, as_module, options)
        else:
            run_as_main(words, as_module)
    except SystemExit as stop:
        if stop.code:
            code, said = (stop.code, "") if isinstance(stop.code, int) else (1, f"{stop.code}\n")
            _exit_with(folder, said, code)
    except BaseException as error:
        if is_out_of_memory(error):
            gate.finish(OUT_OF_MEMORY)
        found = traceback_of(error)
        if found is None and isinstance(error, (ImportError, OSError)):  # by runpy, which found nothing to run
            _exit_with(folder, f"fastmaxsim compare: {error}\n", 2)
        _exit_with(folder, "".join(traceback.format_exception(type(error), error.with_traceback(found), found)), 1)
    if not gate.taken:
        no_step = "ended without a training step: no optimizer stepped in its process"
        _exit_with(folder, f"fastmaxsim compare: {words[0]} {no_step}.\n", 1)
    gate.finish()
