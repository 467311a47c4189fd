"""Trainers, with what they lack for a model that FSDP or DeepSpeed divides among the processes."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from pylate.models import ColBERT
from sentence_transformers import SentenceTransformerTrainer
from transformers import Trainer, TrainingArguments
from transformers.integrations.deepspeed import set_hf_deepspeed_config, unset_hf_deepspeed_config

from pylate_fastmaxsim.recipes.config.schema import Recipe
from pylate_fastmaxsim.recipes.errors import RecipeError, first_line
from pylate_fastmaxsim.recipes.memory import is_out_of_memory
from pylate_fastmaxsim.recipes.training.epochs import batches_done


@contextmanager
def loaded_whole(arguments: TrainingArguments) -> Iterator[None]:
    """Within this, models are loaded whole: DeepSpeed would divide them as they are read, and does so in training."""
    plugin = arguments.deepspeed_plugin
    if plugin is None:
        yield
        return
    unset_hf_deepspeed_config()
    try:
        yield
    finally:
        set_hf_deepspeed_config(plugin.dschf)


def require_reduced_once(recipe: Recipe, arguments: TrainingArguments) -> None:
    """Refuse a loss with several backwards a step where DeepSpeed would, in the middle of the first step.

    Raises
    ------
    RecipeError
        CachedContrastive is to be trained under ZeRO 2 or 3.
    """
    plugin = arguments.deepspeed_plugin
    if plugin is not None and plugin.zero_stage >= 2 and recipe.loss.name == "cached_contrastive":
        raise RecipeError(
            f"loss.name must not be cached_contrastive under DeepSpeed's ZeRO {plugin.zero_stage}, which takes gradients "
            "of one backward a step; use ZeRO 1 or another loss."
        )


class Undivided:
    """Gives a trainer ``_whole``: the model from before it was divided, to put gathered weights into.

    The main process has it, and none where nothing is divided. Checkpoints count as complete when all processes have
    written what is theirs.
    """

    def __init__(self, model: torch.nn.Module, **kwargs: Any) -> None:
        arguments = kwargs["args"]
        wanted = (
            os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true" or arguments.deepspeed_plugin is not None
        )
        self._whole = copy.deepcopy(model).cpu() if wanted and arguments.should_save else None
        super().__init__(model=model, **kwargs)
        if self.is_fsdp_enabled:
            # Parts in files of their own could only be read again by as many processes.
            self.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
        if self.is_deepspeed_enabled:
            zero = self.accelerator.state.deepspeed_plugin.deepspeed_config.setdefault("zero_optimization", {})
            zero["stage3_gather_16bit_weights_on_model_save"] = True

    @property
    def divided(self) -> bool:
        """Whether the trainer's model is not one to save: its weights are parts, or lie in DeepSpeed's buffers."""
        return self.is_fsdp_enabled or self.is_deepspeed_enabled

    def _gathered(self) -> dict[str, Any]:
        return self.accelerator.get_state_dict(self.deepspeed or self.model)

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        # The main process goes on with the file by which a checkpoint is complete; others may end before this one.
        self.accelerator.wait_for_everyone()

    def _load_from_checkpoint(self, checkpoint: str, *arguments: Any) -> None:
        with _read_whole(checkpoint):
            super()._load_from_checkpoint(checkpoint, *arguments)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None and not self.is_deepspeed_enabled:
            # Where one is missing, as where somebody made room, the trainer begins both anew without a word.
            for name in ("optimizer", "scheduler"):
                if not any(Path(checkpoint).glob(f"{name}*")):
                    raise RecipeError(
                        f"output_dir: {checkpoint} has no {name}.pt, without which the training would not go on as it was; "
                        "bring it back, choose another output_dir, or start over with --no-resume."
                    )
        with _read_whole(checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        with _read_whole(checkpoint):
            super()._load_rng_state(checkpoint)


@contextmanager
def _read_whole(checkpoint: str | None) -> Iterator[None]:
    """Say of which checkpoint a file cannot be read, for which each library has an error of its own."""
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise RecipeError(
            f"output_dir: {checkpoint} cannot be read to go on from ({type(error).__name__}: {first_line(error)}); remove "
            "it to go on from the one before, if there is one, choose another output_dir, or start over with --no-resume."
        ) from error


class RecipeTrainer(Undivided, SentenceTransformerTrainer):
    """Saves, resumes and hands back whole models, also under FSDP and DeepSpeed, and goes on with the next batch.

    The trainer of Sentence Transformers saves the model as the process sees it: under FSDP and ZeRO 3 a part of it, and
    under ZeRO 1 and 2 safetensors refuses to, because weights lie in one buffer.
    """

    def whole_model(self) -> ColBERT | None:
        """The model with all its weights. Every process must ask; of a divided one only the main process gets it."""
        if not self.divided:
            return self.model
        weights = self._gathered()
        return self._filled(weights).to(self.args.device) if self.args.should_save else None

    def _filled(self, weights: dict[str, Any]) -> ColBERT:
        self._whole.load_state_dict(weights)
        self._whole.model_card_data = self.model.model_card_data
        return self._whole

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        if not self.divided:
            super()._save(output_dir, state_dict)
            return
        own = self.model
        self.model = self._filled(state_dict).cpu()
        try:
            super()._save(output_dir)
        finally:
            self.model = own

    def _init_training_state(self, *arguments: Any) -> tuple[int, int]:
        """Where training goes on: epochs that are done, and batches of the one begun."""
        super()._init_training_state(*arguments)
        return batches_done(self.state, len(self._train_dataloader))

    def _load_from_checkpoint(self, checkpoint_path: str, model: Any = None) -> None:
        if self.is_fsdp_enabled:
            # Each process its part, as transformers saved them; of Sentence Transformers it would be the whole model.
            Trainer._load_from_checkpoint(self, checkpoint_path, model)
        else:
            super()._load_from_checkpoint(checkpoint_path)
