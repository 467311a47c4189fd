"""Epochs with fewer batches than the trainer counts, as ``no_duplicates`` makes them: where to resume, when to end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers
from sentence_transformers.training_args import BatchSamplers
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from pylate_fastmaxsim.files.replace import replace_file
from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.trainers.checkpoints import CHECKPOINT_LAST_FILE

# transformers from 5.3, where RecipeTrainer can tell the trainer where to resume.
COUNTS_BATCHES = hasattr(Trainer, "_init_training_state")


class RefuseUnevenEpochs(TrainerCallback):
    """Refuses a checkpoint that an older transformers would resume at another batch."""

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        train_dataloader: Any = None,
        **kwargs: Any,
    ) -> None:
        if COUNTS_BATCHES or args.batch_sampler != BatchSamplers.NO_DUPLICATES:
            return
        batches, each = len(train_dataloader), args.gradient_accumulation_steps
        epochs, steps = divmod(state.global_step, -(-batches // each))
        if (epochs, steps * each) != batches_done(state, batches):
            raise RecipeError(
                "training.batch_sampler no_duplicates made fewer batches in an epoch than transformers "
                f"{transformers.__version__} assumes on resuming; install 5.3 or later, or start over with --no-resume."
            )


class FinishByEpochs(TrainerCallback):
    """Saves a run that finishes its epochs in fewer steps than the trainer expects, as one with no step left to do.

    The trainer would save at the step at which it expects the end, and never get there.
    """

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.epochs = int(state.epoch or 0)
        self.saved = state.global_step

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.saved = state.global_step

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        self.epochs += 1
        if self.epochs >= state.num_train_epochs and not control.should_training_stop:
            state.max_steps = state.global_step
            if self.saved != state.global_step:
                control.should_save = args.save_strategy != "no"
            elif args.should_save and state.global_step:
                # Saving this step again would overwrite the last complete checkpoint, file by file.
                checkpoint = Path(args.output_dir, f"checkpoint-{state.global_step}")
                replace_file(checkpoint / CHECKPOINT_LAST_FILE, state.save_to_json)
        return control


def batches_done(state: TrainerState, batches: int) -> tuple[int, int]:
    """Finished epochs, and batches of the current one, where the trainer counts ``batches`` in an epoch.

    The trainer divides the steps by those of a full epoch, but with ``no_duplicates`` an epoch may have fewer.
    """
    return divmod(round((state.epoch or 0) * batches), batches)
