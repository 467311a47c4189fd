"""The phases of a training step, measured in a few extra steps so that the compared run is not slowed down."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from tqdm import tqdm
from transformers import TrainerCallback

from pylate_fastmaxsim.comparison.runs import PHASES

WARM_UP_STEPS = 2
MEASURED_STEPS = 5


class Stopwatch:
    """Splits time into named phases that do not overlap.

    On a CUDA device the marks are events in the stream, so that only :meth:`lap` waits for the device. Elsewhere they
    are times of the host.

    Examples
    --------
    >>> import torch
    >>> from pylate_fastmaxsim.recipes.comparison.phases import Stopwatch
    >>> watch = Stopwatch(torch.device("cpu"))
    >>> watch.start("score")
    >>> watch.enter("encode")
    >>> watch.leave()
    >>> sorted(watch.lap())
    ['encode', 'score']
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._open: list[str] = []
        self._marks: list[tuple[str, Any]] = []

    def start(self, phase: str) -> None:
        """Begin ``phase`` and forget those that were entered."""
        self._open = [phase]
        self._mark()

    def enter(self, phase: str) -> None:
        """Begin ``phase``, until the matching :meth:`leave`."""
        self._open.append(phase)
        self._mark()

    def leave(self) -> None:
        """Return to the phase before the last :meth:`enter`."""
        self._open.pop()
        self._mark()

    def lap(self) -> dict[str, float]:
        """Seconds of each phase since the first :meth:`start` after the last lap. Waits for the device."""
        self._mark()
        marks, self._marks = self._marks, []
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        seconds: dict[str, float] = {}
        for (phase, begin), (_, end) in zip(marks, marks[1:], strict=False):
            passed = begin.elapsed_time(end) / 1000 if self.device.type == "cuda" else end - begin
            seconds[phase] = seconds.get(phase, 0.0) + passed
        return seconds

    def _mark(self) -> None:
        if self.device.type == "cuda":
            now = torch.cuda.Event(enable_timing=True)
            now.record()
        else:
            now = time.perf_counter()
        self._marks.append((self._open[-1], now))


class Phases:
    """Mixin for trainers: ``laps`` holds the seconds of each phase of each step.

    ``tokenise`` is the time that a step waits for its rows. ``encode`` is every forward of the model, also in the
    backward of GradCache. ``score`` is the rest of the loss. ``optimise`` is everything after the backward.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.watch = Stopwatch(self.args.device)
        self.laps: list[dict[str, float]] = []
        self.add_callback(_Laps(self))

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        self.watch.start("optimise")
        return loss

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        self.watch.start("score")
        loss = super().compute_loss(*args, **kwargs)
        self.watch.start("backward")
        return loss

    def train(self, *args: Any, **kwargs: Any) -> Any:
        hooks = [
            self.model.register_forward_pre_hook(lambda *_: self.watch.enter("encode")),
            self.model.register_forward_hook(lambda *_: self.watch.leave()),
        ]
        try:
            return super().train(*args, **kwargs)
        finally:
            for hook in hooks:
                hook.remove()


class _Laps(TrainerCallback):
    def __init__(self, trainer: Phases) -> None:
        self.trainer = trainer
        self.bar: tqdm | None = None

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        # The parent shows the newest bar of the log, which would be that of the evaluation.
        self.bar = tqdm(total=state.max_steps, desc="Measuring phases", unit=" steps")
        self.trainer.watch.start("tokenise")

    def on_step_end(self, args, state, control, **kwargs) -> None:
        self.trainer.laps.append(self.trainer.watch.lap())
        self.bar.update()
        self.trainer.watch.start("tokenise")

    def on_train_end(self, args, state, control, **kwargs) -> None:
        self.bar.close()


def median_phases(laps: list[dict[str, float]]) -> dict[str, float]:
    """The median seconds of each phase, without the warm-up: the first 2 steps, at most a third of all."""
    # There may be fewer steps than asked for, as with the sampler no_duplicates.
    measured = laps[min(WARM_UP_STEPS, len(laps) // 3) :]
    return {phase: statistics.median(lap.get(phase, 0.0) for lap in measured) for phase in PHASES}
