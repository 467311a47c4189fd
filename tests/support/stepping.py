"""A process that steps through a gate as a training does, with a fixed amount of work a step."""

import os

import torch

from pylate_fastmaxsim.comparison.gate import Gate


def main(steps: int, work: int, trace: str) -> None:
    """``work`` products of matrices a step, on one thread; each step adds a line to the file ``trace``."""
    torch.set_num_threads(1)
    gate = Gate.from_environment()
    gate.before_step()
    matrix = torch.ones(200, 200)
    for step in range(steps):
        for _ in range(work):
            matrix @ matrix
        with open(trace, "a") as lines:
            lines.write(f"{os.getpid()}\n")
        gate.after_step(loss=torch.tensor(1 / (step + 1)), of=steps)
    gate.steps_done()
    gate.finished(quality=0.5)
