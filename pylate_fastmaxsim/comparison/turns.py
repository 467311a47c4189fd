"""Processes that train take turns on one machine, so that a load that comes and goes meets all of them alike.

The other end, in each of the processes, is :class:`pylate_fastmaxsim.comparison.gate.Gate`.
"""

import math
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pylate_fastmaxsim.comparison.gate import VARIABLE

FINISHED = "finished"
OUT_OF_MEMORY = "out of memory"
WARM_UP_STEPS = 5
# A block is at least this long, as long as there are as many blocks.
BLOCK_STEPS = 3
BLOCK_SECONDS = 2.0
BLOCKS = 6
# How often each process is started where memory does not hold all of them.
ROUNDS = 3
# Of the memory of the device, beyond which the peaks of all together are too much.
FULL = 0.9
POLL_SECONDS = 0.1
# In CUDA's words: a GPU in exclusive mode, as clusters set it, takes one process at a time.
_EXCLUSIVE = "busy or unavailable"
# To the beginning of a terminal's line, and what is written there is gone.
_CLEAR = "\r\x1b[K"
_LINE_SECONDS = 30
_TAIL = 1000  # of a log, in which its newest line is

Gather = Callable[[Any], list[Any]]


@dataclass(frozen=True)
class Child:
    """The start of a process that has a :class:`~pylate_fastmaxsim.comparison.gate.Gate`."""

    command: Sequence[str]
    log: Path  # receives what it prints
    environment: Mapping[str, str] | None = None  # None: the variables of this process


@dataclass
class Run:
    """A process as it was reported.

    Blocks have ``seconds``, ``cpu_seconds``, ``steps`` (how many) and ``pair``: those of two runs with the same number
    stood beside each other and took the same steps. It is None for blocks that do not count, as the warm-up.
    """

    status: str = FINISHED  # or OUT_OF_MEMORY
    steps: list[dict[str, Any]] = field(default_factory=list)  # what each of them measured
    blocks: list[dict[str, Any]] = field(default_factory=list)
    memory: dict[str, int] = field(default_factory=dict)  # PeakMemory.figures()
    device: str | None = None  # cuda or cpu; None without a block
    wall_seconds: float = 0.0  # how long it had its turn, from its start to its end
    result: dict[str, Any] = field(default_factory=dict)  # what it gave to Gate.finished

    @property
    def counted_blocks(self) -> list[dict[str, Any]]:
        """Blocks that stood beside one of another run."""
        return [block for block in self.blocks if block["pair"] is not None]


@dataclass(frozen=True)
class Turns:
    """All runs by name. ``restarted`` if the device did not take all processes at once, so that whole ones took turns."""

    runs: dict[str, Run]
    restarted: bool


class ChildFailed(RuntimeError):
    """A process ended without a result, and not for lack of memory: its ``name``, ``returncode`` and ``log``."""

    def __init__(self, name: str, returncode: int, log: Path) -> None:
        super().__init__(f"The {name} run ended with exit code {returncode} (see {log})")
        self.name = name
        self.returncode = returncode
        self.log = log


class OutOfMemoryElsewhere(Exception):
    """Raised by ``on_wait`` if another rank ran out of memory, so that this process waits for it in vain."""


def take_turns(
    children: Mapping[str, Child],
    *,
    rounds: int = ROUNDS,
    on_wait: Callable[[], None] = lambda: None,
    gather: Gather = lambda value: [value],
) -> Turns:
    """Start processes that train, and let one of them step at a time, in blocks.

    The first is started and takes its warm-up steps (5, at most a third of all), then the next. After that each takes a
    block of the same number of steps, at least 3 and as many as the fastest does in 2 seconds if at least 6 blocks come
    of it; then in the opposite order, and so on. Whoever has no step left does the rest in one turn, after all steps.

    If the device does not take all of them at once, each goes from its start to its end alone, and in ``rounds - 1`` more
    rounds through its warm-up and a block. All processes are killed when this returns or raises, by SIGTERM too.

    ``on_wait`` is called every tenth of a second; what it raises ends all. ``gather`` returns the values of all ranks for
    that of this one, and is called in the same order on each. ChildFailed if a process, on any rank, ends without a result.
    """
    with _exit_on_sigterm(), _progress(children) as show:

        def wait(name: str) -> None:
            on_wait()
            show(name)

        try:
            with closing(_Session(children, wait, gather)) as session:
                session.alternate_blocks()
                return Turns(session.runs, restarted=False)
        except _NotTogether:
            with closing(_Session(children, wait, gather)) as session:
                session.alternate_processes(rounds)
                return Turns(session.runs, restarted=True)


def python(code: str) -> list[str]:
    """The command line of a Python that runs ``code`` with the ``sys.path`` of this process.

    ``-m`` would import from the working directory. On Linux it is killed when this process ends in any way.
    """
    places = [place for place in sys.path if isinstance(place, str)]
    # PR_SET_PDEATHSIG, SIGKILL
    with_parent = "import ctypes; ctypes.CDLL(None).prctl(1, 9); " if sys.platform == "linux" else ""
    return [sys.executable, "-c", f"{with_parent}import sys; sys.path[:] = {places!r}; {code}"]


class _NotTogether(Exception):
    """The device does not take all processes at once."""


class _Session:
    """Processes that are started, and what they reported; all are killed at its end."""

    def __init__(self, children: Mapping[str, Child], on_wait: Callable[[str], None], gather: Gather) -> None:
        self.runs = {name: Run() for name in children}
        self._children = children
        self._on_wait = on_wait
        self._gather = gather
        self._processes: dict[str, _Process] = {}

    def alternate_blocks(self) -> None:
        """Let all processes step in blocks, each round in the opposite order."""
        for name in self.runs:
            self._start(name)
        order, pair = list(self._processes), 0
        while order:
            self._require_memory_for_all()
            steps = self._steps_of_a_block(BLOCKS)
            for name in order:
                self._give_turn(name, steps, pair)
            order = [name for name in reversed(order) if name in self._processes and not self._processes[name].done]
            pair += 1
        for name in self.runs:
            self._run_to_the_end(name)

    def alternate_processes(self, rounds: int) -> None:
        """Let each process run to its end alone, and in more rounds through its warm-up and a block."""
        names, steps = list(self.runs), None
        for pair in range(rounds):
            for name in names:
                # Kept as it was at the end of its own training.
                known, self.runs[name] = self.runs[name], Run()
                self._start(name, again=pair > 0)
                if name in self._processes:
                    steps = steps or self._steps_of_a_block(1)
                    self._give_turn(name, steps, pair)
                if pair > 0:
                    known.blocks += self.runs[name].counted_blocks
                    self.runs[name] = known
                    self._end(name)
                else:
                    self._run_to_the_end(name)
            names = [name for name in reversed(names) if self.runs[name].status == FINISHED]
            if len(names) < 2:
                return

    def close(self) -> None:
        """Kill all processes."""
        for name in list(self._processes):
            self._end(name)

    def _start(self, name: str, again: bool = False) -> None:
        self._processes[name] = _Process(name, self._children[name], again, self._on_wait)
        try:
            self._read_report(name)
        except ChildFailed as failed:
            if len(self._processes) > 1 and _EXCLUSIVE in failed.log.read_text(encoding="utf-8", errors="replace"):
                raise _NotTogether from None
            raise
        # One step tells how many there are.
        self._give_turn(name, 1)
        if more := self._warm_up_steps() - 1:
            self._give_turn(name, more)

    def _run_to_the_end(self, name: str) -> None:
        while name in self._processes:
            self._give_turn(name, None)

    def _give_turn(self, name: str, steps: int | None, pair: int | None = None) -> None:
        if name in self._processes:
            self._processes[name].give_turn(math.inf if steps is None else steps)
            self._read_report(name, pair)

    def _read_report(self, name: str, pair: int | None = None) -> None:
        run = self.runs[name]
        begun = time.perf_counter()
        try:
            report = self._processes[name].report()
        except OutOfMemoryElsewhere:
            report = _OUT_OF_MEMORY
        run.wall_seconds += time.perf_counter() - begun
        if block := report.get("block"):
            steps = block.pop("steps")
            run.steps += steps
            run.memory, run.device = block.pop("memory"), block.pop("device")
            self._device_memory = block.pop("device_memory")
            if steps:
                run.blocks.append({**block, "steps": len(steps), "pair": pair})
            self._processes[name].done = report["done"]
        result = report.get("finished")
        status = FINISHED if result is None else result.get("status", FINISHED)
        # All ranks go the same way.
        if OUT_OF_MEMORY in self._gather(status):
            if len(self._processes) > 1:
                raise _NotTogether
            status, result = OUT_OF_MEMORY, result or {}
        if result is not None:
            run.status = status
            run.result = {key: value for key, value in result.items() if key != "status"}
            self._end(name)

    def _end(self, name: str) -> None:
        if process := self._processes.pop(name, None):
            process.end()

    def _total(self) -> int | None:
        return min((step["of"] for run in self.runs.values() for step in run.steps[:1] if "of" in step), default=None)

    def _warm_up_steps(self) -> int:
        total = self._total()
        return WARM_UP_STEPS if total is None else max(1, min(WARM_UP_STEPS, total // 3))

    def _steps_of_a_block(self, blocks: int) -> int:
        """The number of steps of the next block, if at least so many blocks are to come of all steps."""
        newest = [run.blocks[-1] for run in self.runs.values() if run.blocks]
        steps = math.ceil(max(BLOCK_SECONDS * block["steps"] / block["seconds"] for block in newest))
        total = self._total()
        if total is not None:
            steps = min(steps, (total - self._warm_up_steps()) // blocks)
        return max(self._gather(max(steps, BLOCK_STEPS)))

    def _require_memory_for_all(self) -> None:
        runs = [self.runs[name] for name in self._processes]
        peaks = [run.memory.get("held", run.memory["peak"]) for run in runs]
        full = len(peaks) > 1 and sum(peaks) > FULL * self._device_memory
        if any(self._gather(full)):
            raise _NotTogether


_OUT_OF_MEMORY = {"finished": {"status": OUT_OF_MEMORY}}


class _Process:
    """A started process, and the pipe to it."""

    def __init__(self, name: str, child: Child, again: bool, on_wait: Callable[[str], None]) -> None:
        self._name = name
        self._log = child.log
        self._on_wait = on_wait
        self.done = False  # without steps that are left
        self._pipe, theirs = multiprocessing.Pipe()
        environment = os.environ if child.environment is None else child.environment
        with open(child.log, "a" if again else "w", encoding="utf-8") as log, theirs:
            self._process = subprocess.Popen(
                child.command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**environment, VARIABLE: str(theirs.fileno())},
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    def give_turn(self, steps: float) -> None:
        """Let it take so many steps."""
        # A process that has ended has said so, which is read next.
        with suppress(OSError):
            self._pipe.send(steps)

    def report(self) -> dict[str, Any]:
        """Wait for the next report."""
        while True:
            # Before the pipe is looked at, or what it says last would be lost.
            ended = self._process.poll() is not None
            with suppress(EOFError, OSError):
                if self._pipe.poll(0 if ended else POLL_SECONDS):
                    return self._pipe.recv()
            if ended:
                if self._process.returncode == -signal.SIGKILL:  # how the kernel ends a process when memory runs out
                    return _OUT_OF_MEMORY
                raise ChildFailed(self._name, self._process.returncode, self._log)
            self._on_wait(self._name)

    def end(self) -> None:
        """Kill it, with the workers of data loaders, which would outlive it for seconds."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._pipe.close()


@contextmanager
def _exit_on_sigterm() -> Iterator[None]:
    """Turn SIGTERM into SystemExit, so that the processes are ended too."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _progress(children: Mapping[str, Child]) -> Iterator[Callable[[str], None]]:
    """Show, from the first rank, which process has its turn and the end of its log; off a terminal every 30 seconds."""
    begun = shown = time.perf_counter()
    on_terminal, first = sys.stderr.isatty(), os.environ.get("RANK", "0") == "0"

    def show(name: str) -> None:
        nonlocal shown
        if not first or not (on_terminal or time.perf_counter() - shown >= _LINE_SECONDS):
            return
        shown = time.perf_counter()
        log = children[name].log
        with open(log, "rb") as opened:
            opened.seek(max(0, log.stat().st_size - _TAIL))
            said = re.split(r"[\r\n]", opened.read().decode("utf-8", errors="replace").strip())[-1]
        line = f"{time.perf_counter() - begun:.0f} s, {log.stem}: {said}"
        if on_terminal:
            line = _CLEAR + line[: shutil.get_terminal_size().columns - 1]
        print(line, end="" if on_terminal else "\n", file=sys.stderr, flush=True)

    try:
        yield show
    finally:
        if on_terminal and first:
            print(_CLEAR, end="", file=sys.stderr, flush=True)
