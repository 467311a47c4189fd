"""Trainers, with what they lack for a model that FSDP divides among the processes."""

from __future__ import annotations

import copy
import os
from typing import Any

import torch
from pylate.models import ColBERT
from sentence_transformers import SentenceTransformerTrainer
from transformers import Trainer

from pylate_fastmaxsim.recipes.epochs import batches_done


class Undivided:
    """Gives a trainer that it is mixed into ``_whole``: the model from before FSDP divided it, to put gathered weights into.

    The main process has it, and none where nothing is divided. Checkpoints count as complete when all processes have
    written what is theirs.
    """

    def __init__(self, model: torch.nn.Module, **kwargs: Any) -> None:
        wanted = os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
        self._whole = copy.deepcopy(model).cpu() if wanted and kwargs["args"].should_save else None
        super().__init__(model=model, **kwargs)
        if self.is_fsdp_enabled:
            # Parts in files of their own could only be read again by as many processes.
            self.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        # The main process goes on with the file by which a checkpoint is complete; others may end before this one.
        self.accelerator.wait_for_everyone()


class RecipeTrainer(Undivided, SentenceTransformerTrainer):
    """Saves, resumes and hands back whole models, also under FSDP, and goes on with the batch that comes next.

    The trainer of Sentence Transformers saves the model as the process sees it, which under FSDP is a part of it.
    """

    def whole_model(self) -> ColBERT | None:
        """The model with all of its weights. Every process must ask; under FSDP only the main process is answered."""
        if not self.is_fsdp_enabled:
            return self.model
        weights = self.accelerator.get_state_dict(self.model)
        return self._filled(weights).to(self.args.device) if self.args.should_save else None

    def _filled(self, weights: dict[str, Any]) -> ColBERT:
        self._whole.load_state_dict(weights)
        self._whole.model_card_data = self.model.model_card_data
        return self._whole

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        if not self.is_fsdp_enabled:
            super()._save(output_dir, state_dict)
            return
        divided = self.model
        self.model = self._filled(state_dict).cpu()
        try:
            super()._save(output_dir)
        finally:
            self.model = divided

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
