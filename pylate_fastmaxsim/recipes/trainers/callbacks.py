"""Callbacks of every training: an interrupted run loses nothing and goes on exactly, and epochs may be uneven."""

import signal
import threading
from pathlib import Path
from typing import Any

import transformers
from sentence_transformers.training_args import BatchSamplers
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState

from pylate_fastmaxsim.files.replace import replace_file
from pylate_fastmaxsim.recipes.errors import RecipeError

# transformers from 5.3, where the trainers of recipes can say where to resume.
COUNTS_BATCHES = hasattr(Trainer, "_init_training_state")


class StopOnInterrupt(TrainerCallback):
    """Saves a checkpoint at the end of the step on the first Ctrl-C; the second stops at once.

    Under a distributed launcher the processes would see the signal in different steps and deadlock. There the first
    one stops at once, and the last regular checkpoint counts.
    """

    def __init__(self) -> None:
        self.requested = False
        self._previous: Any = None

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        if args.world_size == 1 and threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGINT, self._request)

    def on_step_end(self, args, state, control, **kwargs) -> None:
        if self.requested:
            control.should_training_stop = True
            control.should_save = args.save_strategy != "no"

    def _request(self, signum: int, frame: object) -> None:
        self.requested = True
        self.restore()

    def restore(self) -> None:
        """Put back the caller's handler of Ctrl-C, also after an error."""
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)
            self._previous = None


class ResumeExactly(TrainerCallback):
    """Lets a resumed run see the batches that follow, and save and log at the intervals of its recipe.

    The trainer would take the intervals of the checkpoint. The wrapper by which accelerate skips batches does not tell the
    batch sampler its epoch. And an older transformers divides the steps by those of a full epoch, of which
    ``no_duplicates`` makes fewer: such a checkpoint is refused.
    """

    def on_train_begin(self, args, state, control, train_dataloader=None, **kwargs) -> None:
        state.compute_steps(args, state.max_steps)
        if state.best_model_checkpoint is not None:  # in a folder that may have been moved
            state.best_model_checkpoint = str(Path(args.output_dir, Path(state.best_model_checkpoint).name))
        if COUNTS_BATCHES or args.batch_sampler != BatchSamplers.NO_DUPLICATES:
            return
        batches, each = len(train_dataloader), args.gradient_accumulation_steps
        epochs, steps = divmod(state.global_step, -(-batches // each))
        if (epochs, steps * each) != batches_done(state, batches):
            raise RecipeError(
                "training.batch_sampler no_duplicates made fewer batches in an epoch than transformers "
                f"{transformers.__version__} assumes on resuming; install 5.3 or later, or start over with --no-resume."
            )

    def on_epoch_begin(self, args, state, control, train_dataloader=None, **kwargs) -> None:
        if hasattr(train_dataloader, "set_epoch"):
            train_dataloader.set_epoch(int(state.epoch))


class StopEarly(EarlyStoppingCallback):
    """Stops as that of transformers, also after an interruption, and saves the run as one with no step left to do."""

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        super().on_train_begin(args, state, control, **kwargs)
        vars(self).update(state.stateful_callbacks.setdefault(type(self).__name__, self.state())["attributes"])

    def on_evaluate(self, args, state, control, metrics, **kwargs) -> None:
        super().on_evaluate(args, state, control, metrics, **kwargs)
        if control.should_training_stop:
            state.max_steps = state.global_step
            control.should_save = args.save_strategy != "no"


class FinishByEpochs(TrainerCallback, ExportableState):
    """Saves a run that finishes its epochs in fewer steps than the trainer expects, as one with no step left to do.

    The trainer would save at the step at which it expects the end, and never get there. Checkpoints keep the steps and
    epochs that were asked for, by which a run that is to be longer is told from one that is over.
    """

    def __init__(self, asked: dict[str, float | None]) -> None:
        self.asked = asked

    def state(self) -> dict[str, Any]:
        return {"args": {"asked": self.asked}, "attributes": {}}

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        state.stateful_callbacks.setdefault(type(self).__name__, self.state())
        self.epochs = int(state.epoch or 0)
        self.saved = state.global_step

    def on_save(self, args, state, control, **kwargs) -> None:
        self.saved = state.global_step

    def on_epoch_end(self, args, state, control, **kwargs) -> None:
        self.epochs += 1
        if self.epochs < state.num_train_epochs or control.should_training_stop:
            return
        state.max_steps = state.global_step
        if self.saved != state.global_step:
            control.should_save = args.save_strategy != "no"
        elif args.should_save and state.global_step:
            # Saving this step again would overwrite the last complete checkpoint, file by file.
            checkpoint = Path(args.output_dir, f"checkpoint-{state.global_step}")
            replace_file(checkpoint / TRAINER_STATE_NAME, state.save_to_json)


def batches_done(state: TrainerState, batches: int) -> tuple[int, int]:
    """Finished epochs, and batches of the current one, where the trainer counts ``batches`` in an epoch."""
    return divmod(round((state.epoch or 0) * batches), batches)
