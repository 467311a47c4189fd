"""One of the two runs of a comparison, in a process of its own: ``python -m pylate_fastmaxsim.recipes.measure``."""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from sentence_transformers import SentenceTransformerTrainer
from transformers import TrainerCallback

from pylate_fastmaxsim.recipes.data import load_data
from pylate_fastmaxsim.recipes.load import load_recipe
from pylate_fastmaxsim.recipes.memory import PeakMemory
from pylate_fastmaxsim.recipes.model import load_model
from pylate_fastmaxsim.recipes.schema import Recipe
from pylate_fastmaxsim.recipes.train import build_trainer, evaluate, switched, training_arguments

FINISHED = "finished"
OUT_OF_MEMORY = "out of memory"


def measure(recipe: Recipe, steps_file: Path) -> dict[str, Any]:
    """Train a prepared recipe once, measured step by step, and evaluate it.

    Parameters
    ----------
    recipe
        A recipe of which everything is on disk already (see ``prepare``).
    steps_file
        JSON lines, one per finished step, flushed as they come: what is left of a run that is killed.

    Returns
    -------
    ``status`` (finished, or out of memory), ``memory`` in bytes, ``ndcg@10`` and other metrics of the evaluation, the ``warnings`` of the
    plugin (what it could not accelerate, and why) and the environment.
    """
    warnings = _Warnings()
    logging.getLogger("pylate_fastmaxsim").addHandler(warnings)
    arguments = training_arguments(recipe, save_strategy="no", logging_strategy="no", report_to=[], disable_tqdm=True)
    data = load_data(recipe)
    model = load_model(recipe.model, arguments.device, recipe.training.seed)
    result = {
        "status": FINISHED,
        "warnings": warnings.messages,
        "environment": environment(arguments.device),
    }
    with switched(recipe.fast), open(steps_file, "w", encoding="utf-8") as lines:
        trainer = build_trainer(recipe, model, data.train, arguments, MeasuredTrainer)
        trainer.add_callback(_StepWriter(trainer, lines))
        memory = PeakMemory(arguments.device)
        try:
            trainer.train()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            result["status"] = OUT_OF_MEMORY
        result["memory"] = {"before": memory.before, "peak": memory.peak()}
        if result["status"] == FINISHED:
            result |= evaluate(recipe, model, data)
    return result


class MeasuredTrainer(SentenceTransformerTrainer):
    """The trainer, with the loss and the tokens of the current step kept as ``measured``.

    ``encoded`` counts the tokens that the encoder was given, so it includes padding and leaves out
    what was packed away. A first pass without gradients (GradCache) does not count twice.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.measured: dict[str, Any] = {}
        self.start_step()
        self.model[0].auto_model.register_forward_pre_hook(self._count_encoded, with_kwargs=True)

    def start_step(self) -> None:
        self.measured = {"loss": 0.0, "documents": 0, "live": 0, "query_tokens": 0, "encoded": 0}

    def training_step(self, model: torch.nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        (queries, *documents), _ = self.collect_features(inputs)
        self.measured["query_tokens"] += queries["input_ids"].numel()
        for column in documents:
            self.measured["documents"] += len(column["attention_mask"])
            self.measured["live"] += column["attention_mask"].sum()
        loss = super().training_step(model, inputs, *args, **kwargs)
        self.measured["loss"] += loss.detach()
        return loss

    def _count_encoded(self, module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if torch.is_grad_enabled():
            self.measured["encoded"] += kwargs["input_ids"].numel()


class _StepWriter(TrainerCallback):
    """Writes one line per optimizer step; its time runs from the end of the last step, data loading included."""

    def __init__(self, trainer: MeasuredTrainer, lines: Any) -> None:
        self.trainer = trainer
        self.lines = lines
        self.last = 0.0

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        self.last = self._now(args.device)

    def on_step_end(self, args, state, control, **kwargs) -> None:
        now = self._now(args.device)
        measured = {
            name: float(value) if name == "loss" else int(value) for name, value in self.trainer.measured.items()
        }
        self.lines.write(json.dumps({"step": state.global_step, "seconds": now - self.last, **measured}) + "\n")
        self.lines.flush()
        self.trainer.start_step()
        self.last = self._now(args.device)

    @staticmethod
    def _now(device: torch.device) -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()


class _Warnings(logging.Handler):
    """Keeps the warnings of a logger, so that the comparison can show them."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def is_out_of_memory(error: BaseException) -> bool:
    """Whether PyTorch ran out of memory: on a CPU it says so only in the text of a RuntimeError."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)


def environment(device: torch.device) -> dict[str, Any]:
    """What the numbers were measured with."""
    threads = torch.get_num_threads()
    cores = "1 thread" if threads == 1 else f"{threads} threads"
    packages = ("pylate-fastmaxsim", "pylate", "sentence-transformers", "transformers", "torch")
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU ({cores})",
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        **{package: version(package) for package in packages},
    }


def main() -> None:
    """Measure the recipe that the command line names and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe", type=Path, help="prepared recipe")
    parser.add_argument("steps", type=Path, help="JSON lines file of the steps")
    parser.add_argument("result", type=Path, help="JSON file of the result")
    arguments = parser.parse_args()
    result = measure(load_recipe(arguments.recipe), arguments.steps)
    arguments.result.write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()
