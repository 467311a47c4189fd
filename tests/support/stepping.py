"""A process that steps through a gate, as a training does: ``python stepping.py '{"steps": 12, ...}'``."""

import json
import os
import signal
import sys
import time

from pylate_fastmaxsim.comparison.gate import Gate


def main(steps: int, seconds: float = 0.01, burn: bool = True, end: str | None = None, at: int = 3, trace: str = ""):
    """``end`` says what happens at step ``at``: exit, kill (by SIGKILL), memory, or nothing (None).

    Each step adds a line to the file ``trace``.
    """
    gate = Gate.from_environment()
    gate.before_step()
    for step in range(steps):
        begun = time.perf_counter()
        while time.perf_counter() - begun < seconds:
            if not burn:
                time.sleep(seconds)
        if trace:
            with open(trace, "a") as lines:
                lines.write(f"{os.getpid()}\n")
        if step == at and end == "exit":
            sys.exit("nothing works")
        if step == at and end == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if step == at and end == "memory":
            gate.finished(status="out of memory")
            return
        gate.after_step(loss=1 / (step + 1), of=steps)
    gate.steps_done()
    gate.finished(quality=0.5)


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
