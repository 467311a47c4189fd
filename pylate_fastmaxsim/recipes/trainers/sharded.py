"""Trainers that save and load whole models where FSDP or DeepSpeed shards them."""

import copy
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from sentence_transformers import SentenceTransformerTrainer
from transformers import Trainer, TrainingArguments
from transformers.integrations.deepspeed import set_hf_deepspeed_config, unset_hf_deepspeed_config
from transformers.trainer_utils import IntervalStrategy, has_length

from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.trainers.callbacks import batches_done


@contextmanager
def unsharded_loading(arguments: TrainingArguments) -> Iterator[None]:
    """Load models whole within this block. DeepSpeed would shard them while reading; the trainer shards them later."""
    plugin = arguments.deepspeed_plugin
    if plugin is None:
        yield
        return
    unset_hf_deepspeed_config()
    try:
        yield
    finally:
        set_hf_deepspeed_config(plugin.dschf)


def is_sharded(arguments: TrainingArguments) -> bool:
    """True if the launcher asks for FSDP or DeepSpeed."""
    return os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true" or arguments.deepspeed_plugin is not None


class WholeModelMixin:
    """Gives a trainer ``_whole``: a copy of the model from before sharding, into which gathered weights are loaded.

    Only the main process has it, and only where the model is sharded.
    """

    # The metrics of a recipe's evaluation by name; set before a training that evaluates.
    measure: Callable[[Any], dict[str, float | None]]

    def __init__(self, model: torch.nn.Module, **kwargs: Any) -> None:
        arguments = kwargs["args"]
        # The host would ask for rows to compute a loss of.
        evaluates, arguments.eval_strategy = arguments.eval_strategy, IntervalStrategy.NO
        self._whole = copy.deepcopy(model).cpu() if is_sharded(arguments) and arguments.should_save else None
        self.evaluation_seconds = 0.0
        super().__init__(model=model, **kwargs)
        arguments.eval_strategy = evaluates
        if self.is_fsdp_enabled:
            # Files of shards could only be read by the same number of processes.
            self.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
        if self.is_deepspeed_enabled:
            zero = self.accelerator.state.deepspeed_plugin.deepspeed_config.setdefault("zero_optimization", {})
            zero["stage3_gather_16bit_weights_on_model_save"] = True

    @property
    def is_sharded(self) -> bool:
        """True if the model cannot be saved as it is: weights are shards, or lie in DeepSpeed's buffers."""
        return self.is_fsdp_enabled or self.is_deepspeed_enabled

    def whole_model(self) -> torch.nn.Module | None:
        """The model with all its weights. Every process must call this; of a sharded model only the main one gets it."""
        if not self.is_sharded:
            return self.model
        weights = self.accelerator.get_state_dict(self.deepspeed or self.model)
        return self._filled(weights).to(self.args.device) if self.args.should_save else None

    def _filled(self, weights: dict[str, Any]) -> torch.nn.Module:
        """The copy from before sharding, with gathered weights."""
        raise NotImplementedError

    def evaluate(self, *_: Any, metric_key_prefix: str = "eval", **__: Any) -> dict[str, float]:
        """Measure the model as the recipe's evaluation does, in the main process, and log the metrics as ``eval_NAME``.

        NaN stands for metrics of embeddings that are not finite.
        """
        begun = time.perf_counter()
        found = [self.measure(self.whole_model()) if self.is_world_process_zero() else None]
        broadcast_object_list(found)
        metrics = {
            f"{metric_key_prefix}_{name}": math.nan if value is None else value for name, value in found[0].items()
        }
        self.log(metrics)
        self.evaluation_seconds += time.perf_counter() - begun
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        # The main process writes trainer_state.json next, which marks a checkpoint as complete.
        self.accelerator.wait_for_everyone()

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None and not self.is_deepspeed_enabled:
            # Some delete optimizer.pt to save space. Without it the trainer would silently begin with a new optimizer.
            for name in ("optimizer", "scheduler"):
                if not any(Path(checkpoint).glob(f"{name}*")):
                    raise RecipeError(
                        f"output_dir: {checkpoint} has no {name}.pt and cannot be gone on from; bring it back, choose another "
                        "output_dir, or start over with --no-resume."
                    )
        super()._load_optimizer_and_scheduler(checkpoint)


def note_metrics(model: Any, metrics: dict[str, float]) -> None:
    """Add nDCG@10 to the last row of the log of training in a model's card, which the host has begun."""
    model.model_card_data.training_logs[-1]["ndcg@10"] = metrics["eval_ndcg@10"]


class TextTrainerMixin(WholeModelMixin):
    """Saves, resumes and returns whole models, also under FSDP and DeepSpeed, and goes on with the next batch.

    The trainers of Sentence Transformers save the model as the process sees it. Under FSDP and ZeRO 3 that is a shard;
    under ZeRO 1 and 2 safetensors refuses it, because the weights share one buffer.
    """

    def _filled(self, weights: dict[str, Any]) -> torch.nn.Module:
        self._whole.load_state_dict(weights)
        self._whole.model_card_data = self.model.model_card_data
        return self._whole

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        if not self.is_sharded:
            super()._save(output_dir, state_dict)
            return
        own = self.model
        self.model = self._filled(state_dict).cpu()
        try:
            super()._save(output_dir)
        finally:
            self.model = own

    def _init_training_state(self, *arguments: Any) -> tuple[int, int]:
        """Epochs that are done, and batches of the one begun, from where training goes on."""
        done = super()._init_training_state(*arguments)
        # Rows that are streamed have no number, and one epoch without an end.
        return batches_done(self.state, len(self._train_dataloader)) if has_length(self._train_dataloader) else done

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        metrics = super().evaluate(*args, **kwargs)
        note_metrics(self.model, metrics)
        return metrics

    def _load_best_model(self) -> None:
        """As that of Sentence Transformers, which only logs an error."""
        self.model.model_card_data.set_best_model_step(self.state.best_global_step)
        self._load_from_checkpoint(self.state.best_model_checkpoint)

    def _load_from_checkpoint(self, checkpoint_path: str, model: Any = None) -> None:
        if self.is_fsdp_enabled:
            # transformers loads each process its shard, Sentence Transformers would load the whole model.
            Trainer._load_from_checkpoint(self, checkpoint_path, model)
        else:
            super()._load_from_checkpoint(checkpoint_path)


class RecipeTrainer(TextTrainerMixin, SentenceTransformerTrainer):
    """The trainer of PyLate's models."""
