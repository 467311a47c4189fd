"""What a training is going to do, and how fast it was."""

import time
from collections.abc import Callable
from typing import Any

from torch import nn
from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments

from pylate_fastmaxsim.integrations.encoding.modes import chosen
from pylate_fastmaxsim.recipes.config.schema import Recipe
from pylate_fastmaxsim.recipes.data.collection import RecipeData


class Summary(TrainerCallback):
    """Tells ``begin`` what is trained, in the main process, calls ``evaluate`` before the first step, and times the training."""

    def __init__(
        self,
        recipe: Recipe,
        data: RecipeData,
        begin: Callable[[dict[str, Any]], object],
        evaluate: Callable[[], object] | None,
    ) -> None:
        self._recipe, self._data, self._begin, self._evaluate = recipe, data, begin, evaluate

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        self._started, self._epoch, self._step = time.perf_counter(), state.epoch or 0, state.global_step
        if state.is_world_process_zero:
            self._begin(self._described(args, state))
        if self._evaluate is not None and state.global_step == 0:
            self._evaluate()

    def _described(self, args: TrainingArguments, state: TrainerState) -> dict[str, Any]:
        held_out = self._data.held_out
        return {
            "recipe": self._recipe.name,
            "rows": None if self._recipe.data.streaming else len(self._data.train),
            "empty": self._data.empty,
            "held_out": None if held_out is None else len(held_out),
            "precision": "bf16" if args.bf16 else "fp16" if args.fp16 else "fp32",
            "device": str(args.device),
            "batch": args.train_batch_size * args.gradient_accumulation_steps * args.world_size,
            "step": state.global_step,
            "steps": state.max_steps,
            "fast": self._recipe.fast.enabled,
            "report_to": list(args.report_to),
        }

    def on_train_end(self, args, state, control, **kwargs) -> None:
        self._seconds = time.perf_counter() - self._started

    def speed(self, trainer: Trainer) -> dict[str, float | None]:
        """Seconds of the training in this run, and rows a second, without evaluations."""
        seconds, state, args = self._seconds - trainer.evaluation_seconds, trainer.state, trainer.args
        if self._recipe.data.streaming:
            batch = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
            rows = (state.global_step - self._step) * batch
        else:
            rows = (state.epoch - self._epoch) * len(self._data.train)
        return {"seconds": seconds, "rows_per_second": rows / seconds}


def encoding_mode(model: nn.Module) -> str | None:
    """How the plugin has encoded the texts of a model, "packed", "grouped" or "padded"; None if it has not."""
    modes = {mode for module in model.modules() for mode in chosen.get(module, {}).values()}
    return " and ".join(sorted(modes)) or None


def metrics_before(state: TrainerState) -> dict[str, float] | None:
    """The metrics of an evaluation before the first step."""
    found = next((entry for entry in state.log_history if entry["step"] == 0 and "eval_ndcg@10" in entry), None)
    return found and {name.removeprefix("eval_"): each for name, each in found.items() if name.startswith("eval_")}
