"""The phases of a training step, measured in a few extra steps so that the compared run is not slowed down."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import Trainer, TrainerCallback

from pylate_fastmaxsim.comparison.verdict import PHASES

WARM_UP_STEPS = 2
STEPS = WARM_UP_STEPS + 5


class Stopwatch:
    """Splits time into named phases, one after the other.

    On a CUDA device the marks are events in the stream, so that only :meth:`lap` waits for the device. Elsewhere they
    are times of the host.

    Examples
    --------
    >>> import torch
    >>> from pylate_fastmaxsim.recipes.comparison.phases import Stopwatch
    >>> watch = Stopwatch(torch.device("cpu"))
    >>> watch.start("score")
    >>> watch.start("encode")
    >>> sorted(watch.lap())
    ['encode', 'score']
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.phase = ""
        self._marks: list[tuple[str, Any]] = []

    def start(self, phase: str) -> None:
        """End the phase that was started last, and begin another one."""
        self.phase = phase
        if self.device.type == "cuda":
            now = torch.cuda.Event(enable_timing=True)
            now.record()
        else:
            now = time.perf_counter()
        self._marks.append((phase, now))

    def lap(self) -> dict[str, float]:
        """Seconds of each phase since the first :meth:`start` after the last lap. Waits for the device."""
        self.start(self.phase)
        marks, self._marks = self._marks, []
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        seconds: dict[str, float] = {}
        for (phase, begin), (_, end) in zip(marks, marks[1:], strict=False):
            passed = begin.elapsed_time(end) / 1000 if self.device.type == "cuda" else end - begin
            seconds[phase] = seconds.get(phase, 0.0) + passed
        return seconds


class PhaseTimer(TrainerCallback):
    """Times the phases of each step of a Trainer that begins to train: ``laps`` holds their seconds.

    ``tokenise`` is the time that a step waits for its rows. ``encode`` is every forward of the model, also in the
    backward of GradCache. ``score`` is the rest of the loss. ``optimise`` is everything after the backward.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.laps: list[dict[str, float]] = []
        self._watch = Stopwatch(trainer.args.device)
        self._interrupted = ""
        trainer.compute_loss = self._timed(trainer.compute_loss, "score", "backward")
        trainer.training_step = self._timed(trainer.training_step, None, "optimise")
        self._hooks = [
            trainer.model.register_forward_pre_hook(self._enter_model),
            trainer.model.register_forward_hook(self._leave_model),
        ]
        trainer.add_callback(self)

    def _timed(self, function: Callable[..., Any], before: str | None, after: str) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            if before is not None:
                self._watch.start(before)
            result = function(*args, **kwargs)
            self._watch.start(after)
            return result

        return timed

    def _enter_model(self, *_: Any) -> None:
        self._interrupted = self._watch.phase
        self._watch.start("encode")

    def _leave_model(self, *_: Any) -> None:
        self._watch.start(self._interrupted)

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        self._watch.start("tokenise")

    def on_step_end(self, args, state, control, **kwargs) -> None:
        self.laps.append(self._watch.lap())
        self._watch.start("tokenise")

    def on_train_end(self, args, state, control, **kwargs) -> None:
        for hook in self._hooks:
            hook.remove()

    def median_seconds(self) -> dict[str, float]:
        """The median seconds of each phase, without the warm-up: the first 2 steps, at most a third of all."""
        # There may be fewer steps than asked for, as with the sampler no_duplicates.
        measured = self.laps[min(WARM_UP_STEPS, len(self.laps) // 3) :]
        return {phase: statistics.median(lap.get(phase, 0.0) for lap in measured) for phase in PHASES}
