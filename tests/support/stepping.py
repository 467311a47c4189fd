"""A process that steps through a gate as a training does, with a fixed amount of work a step."""

import os
import sys
from pathlib import Path

import torch

from pylate_fastmaxsim.comparison import gate as gates
from pylate_fastmaxsim.comparison.gate import Gate


class Clock:
    """A clock that only its owner moves: what the machine does meanwhile does not show."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now

    process_time = perf_counter


def main(
    steps: int, work: int = 10, fails_at: int | None = None, trace: str | None = None, loaded_from: int | None = None
) -> None:
    """``work`` products of matrices a step, on one thread; each step adds a line to the file ``trace``.

    With ``loaded_from`` a step takes ``work`` milliseconds of a clock of its own instead, and three times as many once
    the file has so many lines.
    """
    torch.set_num_threads(1)
    clock = Clock()
    if loaded_from is not None:
        gates.time = clock
        gates.cpu_seconds = clock.process_time
    gate = Gate.from_environment()
    gate.before_step()
    matrix = torch.ones(200, 200)
    for step in range(steps):
        if loaded_from is None:
            for _ in range(work):
                matrix @ matrix
        if trace:
            with open(trace, "a") as lines:
                lines.write(f"{os.getpid()}\n")
        if loaded_from is not None:
            loaded = Path(trace).read_text().count("\n") >= loaded_from
            clock.now += work / 1000 * (3 if loaded else 1)
        if step == fails_at:
            sys.exit("nothing works")
        gate.after_step(loss=torch.tensor(1 / (step + 1)), of=steps)
    gate.steps_done()
    gate.finished(quality=0.5)
