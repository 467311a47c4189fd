"""The phases of a training step, measured in a few extra steps so that the compared run is not slowed down."""

import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from transformers import Trainer, TrainerCallback

from pylate_fastmaxsim.comparison.verdict import PHASES

WARM_UP_STEPS = 2
STEPS = WARM_UP_STEPS + 5


class PhaseTimer(TrainerCallback):
    """Times the phases of each step of a Trainer that begins to train: ``laps`` holds their seconds.

    ``tokenise`` is the time that a step waits for its rows. ``encode`` is every forward of the model, also in the
    backward of GradCache. ``score`` is the rest of the loss. ``optimise`` is everything after the backward. On a GPU the
    beginnings of phases are events in the stream, so that only the end of a step waits for the device.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.laps: list[dict[str, float]] = []
        self._on_gpu = trainer.args.device.type == "cuda"
        self._begun: list[tuple[str, Any]] = []
        self._interrupted = ""
        trainer.compute_loss = self._timed(trainer.compute_loss, "score", "backward")
        trainer.training_step = self._timed(trainer.training_step, None, "optimise")
        self._hooks = [
            trainer.model.register_forward_pre_hook(self._enter_model),
            trainer.model.register_forward_hook(self._leave_model),
        ]
        trainer.add_callback(self)

    def median_seconds(self) -> dict[str, float]:
        """The median seconds of each phase, without the warm-up: the first 2 steps, at most a third of all."""
        # There may be fewer steps than asked for, as with the sampler no_duplicates.
        measured = self.laps[min(WARM_UP_STEPS, len(self.laps) // 3) :]
        return {phase: statistics.median(lap[phase] for lap in measured) for phase in PHASES}

    def _begin(self, phase: str) -> None:
        if self._on_gpu:
            now = torch.cuda.Event(enable_timing=True)
            now.record()
        else:
            now = time.perf_counter()
        self._begun.append((phase, now))

    def _timed(self, function: Callable[..., Any], before: str | None, after: str) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            if before is not None:
                self._begin(before)
            result = function(*args, **kwargs)
            self._begin(after)
            return result

        return timed

    def _enter_model(self, *_: Any) -> None:
        self._interrupted = self._begun[-1][0]
        self._begin("encode")

    def _leave_model(self, *_: Any) -> None:
        self._begin(self._interrupted)

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        self._begin("tokenise")

    def on_step_end(self, args, state, control, **kwargs) -> None:
        self._begin("tokenise")
        if self._on_gpu:
            torch.cuda.synchronize()
        lap = dict.fromkeys(PHASES, 0.0)
        for (phase, begin), (_, end) in pairwise(self._begun):
            lap[phase] += begin.elapsed_time(end) / 1000 if self._on_gpu else end - begin
        self.laps.append(lap)
        del self._begun[:-1]

    def on_train_end(self, args, state, control, **kwargs) -> None:
        for hook in self._hooks:
            hook.remove()
