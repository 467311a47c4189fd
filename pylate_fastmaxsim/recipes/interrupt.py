"""Ctrl-C during training: finish the step, save a checkpoint, stop."""

from __future__ import annotations

import signal
import threading

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


class StopOnInterrupt(TrainerCallback):
    """Turns the first interrupt into a checkpoint at the end of the step; the second acts at once.

    Under a distributed launcher the processes would see the signal in different steps and wait for
    each other for ever, so there an interrupt acts at once and the last regular checkpoint counts.
    """

    def __init__(self) -> None:
        self.requested = False
        self._previous = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs
    ) -> TrainerControl:
        if args.world_size == 1 and threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGINT, self._request)
        return control

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs
    ) -> TrainerControl:
        if self.requested:
            control.should_training_stop = True
            control.should_save = args.save_strategy != "no"
        return control

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs
    ) -> TrainerControl:
        self._restore()
        return control

    def _request(self, signum: int, frame: object) -> None:
        self.requested = True
        self._restore()

    def _restore(self) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)
            self._previous = None
