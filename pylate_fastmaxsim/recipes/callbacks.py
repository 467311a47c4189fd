"""What the trainer lacks for an interrupted run to lose nothing."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Any

import transformers
from sentence_transformers.training_args import BatchSamplers
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from pylate_fastmaxsim.recipes.output import CHECKPOINT_LAST_FILE
from pylate_fastmaxsim.recipes.schema import RecipeError

# Whether RecipeTrainer can tell the trainer where to go on.
COUNTS_BATCHES = hasattr(Trainer, "_init_training_state")


class StopOnInterrupt(TrainerCallback):
    """Turns the first interrupt into a checkpoint at the end of the step; the second acts at once.

    Under a distributed launcher the processes would see the signal in different steps and wait for
    each other for ever, so there an interrupt acts at once and the last regular checkpoint counts.
    """

    def __init__(self) -> None:
        self.requested = False
        self._previous: Any = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if args.world_size == 1 and threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGINT, self._request)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        if self.requested:
            control.should_training_stop = True
            control.should_save = args.save_strategy != "no"
        return control

    def _request(self, signum: int, frame: object) -> None:
        self.requested = True
        self.restore()

    def restore(self) -> None:
        """Let an interrupt do again what it did before: for whoever started the training, which may end by raising."""
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)
            self._previous = None


class ShuffleByEpoch(TrainerCallback):
    """Tells the batch sampler its epoch before batches are skipped on resuming.

    accelerate wraps the sampler to skip batches and the wrapper does not pass the epoch on, so a run
    resumed in its second epoch would go through the rows in the order of the first.
    """

    def on_epoch_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        train_dataloader: Any = None,
        **kwargs: Any,
    ) -> None:
        if hasattr(train_dataloader, "set_epoch"):
            train_dataloader.set_epoch(int(state.epoch))


class StepsAsAsked(TrainerCallback):
    """Saves and logs as often as the recipe says now: the trainer takes over how often from the checkpoint."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        state.compute_steps(args, state.max_steps)


class RefuseUnevenEpochs(TrainerCallback):
    """Refuses a checkpoint from which a trainer without :func:`batches_done` would go on elsewhere."""

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
                "training.batch_sampler no_duplicates left fewer batches in an epoch than transformers "
                f"{transformers.__version__} counts when it goes on; install 5.3 or later, or start over with --no-resume."
            )


class FinishByEpochs(TrainerCallback):
    """Saves a run that has gone through its epochs in fewer steps than counted, and as one with no step left to do.

    Without duplicates an epoch may have fewer batches than its rows would fill, and the trainer saves at the step at
    which it expects the end.
    """

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.epochs = int(state.epoch or 0)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        self.epochs += 1
        if self.epochs >= state.num_train_epochs and not control.should_training_stop:
            state.max_steps = state.global_step
            control.should_save = args.save_strategy != "no"
            if control.should_save and args.should_save:
                # A checkpoint of this step is written once more, and until that is done it is not complete.
                folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
                (folder / CHECKPOINT_LAST_FILE).unlink(missing_ok=True)
        return control


def batches_done(state: TrainerState, batches: int) -> tuple[int, int]:
    """Epochs that are done, and batches of the one begun, where the trainer counts ``batches`` in each.

    The trainer itself divides the steps by those of a full epoch, and without duplicates an epoch may have fewer.
    """
    return divmod(round((state.epoch or 0) * batches), batches)
