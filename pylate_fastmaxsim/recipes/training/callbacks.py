"""Callbacks by which an interrupted run loses nothing."""

from __future__ import annotations

import signal
import threading
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


class StopOnInterrupt(TrainerCallback):
    """Saves a checkpoint at the end of the step on the first Ctrl-C; the second stops at once.

    Under a distributed launcher the processes would see the signal in different steps and deadlock. There the first
    one stops at once, and the last regular checkpoint counts.
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
        """Put back the caller's handler of Ctrl-C, also after an error."""
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)
            self._previous = None


class ShuffleByEpoch(TrainerCallback):
    """Tells the batch sampler its epoch before batches are skipped on resuming.

    The wrapper by which accelerate skips batches does not pass the epoch on. A run resumed in its second epoch would
    see the rows in the order of the first.
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


class IntervalsOfRecipe(TrainerCallback):
    """Saves and logs at the intervals of the recipe; the trainer would take those of the checkpoint."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        state.compute_steps(args, state.max_steps)
