"""``fastmaxsim compare train.py``: a training script as it is, for some steps, stock and accelerated by turns."""

from __future__ import annotations

import json
import os
import shlex
import socket
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from pylate_fastmaxsim.comparison.report import RESULT_FILE, SUFFIXES, publish
from pylate_fastmaxsim.comparison.script_child import FAILURE, script_comparison_parser
from pylate_fastmaxsim.comparison.turns import (
    OUT_OF_MEMORY,
    Child,
    ChildFailed,
    OutOfMemoryElsewhere,
    python,
    take_turns,
)
from pylate_fastmaxsim.comparison.verdict import FAST, MODES, summarize_turns
from pylate_fastmaxsim.files.replace import require_replaceable
from pylate_fastmaxsim.integrations.run_script import parse
from pylate_fastmaxsim.reporting.numbers import without_nan

INTERRUPTED = 130
SEVERAL_MACHINES = (
    "compare measures on one machine, and this launcher starts processes on several; start it with those of one."
)
# How many characters at the end of a log are repeated where a script fails without a traceback.
_LOG_END = 2000
_POLL_SECONDS = 0.005


def compare_script(arguments: Sequence[str], prog: str = "fastmaxsim compare") -> None:
    """Run a training script for some steps, stock and with ``enable``, and report time, memory and loss side by side.

    The arguments are ``--steps``, ``--output`` and the options of ``enable``, then ``SCRIPT.py`` or ``-m MODULE`` and those
    of the script. Both runs are processes of their own that take their steps by turns, in short blocks. They save and
    evaluate nothing, and end behind the last step. If the script fails, this exits with its exit code and its traceback.
    """
    parser = script_comparison_parser(prog)
    options, words, as_module = parse(parser, arguments)
    if not as_module and not Path(words[0]).exists():
        parser.error(f"there is no script {words[0]}.")
    steps, output = options.pop("steps"), Path(options.pop("output")).expanduser()
    try:
        ranks = Ranks()
        output.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=output).close()  # can be written into
        for suffix in SUFFIXES:
            require_replaceable((output / RESULT_FILE).with_suffix(suffix))
    except (ValueError, OSError) as error:
        parser.error(str(error))
    with tempfile.TemporaryDirectory(prefix="fastmaxsim-compare-") as scratch:
        children = {mode: child_of(mode, Path(scratch), output, arguments, ranks) for mode in MODES}
        try:
            turns = take_turns(children, on_wait=ranks.require_memory_elsewhere, gather=ranks.gather)
        except ChildFailed as failed:
            _exit_as_the_script(failed, Path(scratch))
        except KeyboardInterrupt:
            print("\nInterrupted.", file=sys.stderr)
            sys.exit(INTERRUPTED)
    if ranks.rank == 0:
        given = {name: str(value) for name, value in options.items()}
        command = {"name": Path(words[0]).name, "command": shlex.join(words), "processes": ranks.size, "steps": steps}
        try:
            comparison = {"recipe": command | {"options": given}, **summarize_turns(turns)}
            publish(without_nan(comparison), output / RESULT_FILE)
        except OSError as error:
            sys.exit(f"fastmaxsim: the result cannot be written to {output}: {error.strerror}.")


def child_of(mode: str, scratch: Path, output: Path, arguments: Sequence[str], ranks: Ranks) -> Child:
    """The process of one of the two runs; its log goes to ``output``, all else that it writes to ``scratch``."""
    folder = scratch / mode
    folder.mkdir()
    program = python("from pylate_fastmaxsim.comparison.script_child import main; main()")
    # Else the order of a set of texts, and what a script draws from it, is another one in each process.
    environment = {"PYTHONHASHSEED": "0"} | ranks.environment()
    log = output / (f"{mode}.log" if ranks.size == 1 else f"{mode}-{ranks.rank}.log")
    return Child([*program, mode, str(folder), *arguments], log, environment)


def _exit_as_the_script(failed: ChildFailed, scratch: Path) -> NoReturn:
    """Exit with the traceback and the exit code of the script; of the stock run with nothing else."""
    if failed.name == FAST:
        print("fastmaxsim: the run with this package fails; stock had not failed so far:", file=sys.stderr)
    file = scratch / failed.name / FAILURE
    said = file.read_text(encoding="utf-8") if file.exists() else f"fastmaxsim: {failed}\n"
    # A script that exits by a code has said why, as argparse does.
    sys.stderr.write(said or failed.log.read_text(encoding="utf-8", errors="replace")[-_LOG_END:])
    # Without a result 0 would say that there is one.
    sys.exit(failed.returncode or 1 if failed.returncode >= 0 else 128 - failed.returncode)


class Ranks:
    """The processes that a launcher started on this machine; one alone where there is no launcher.

    Each compares its own share of a distributed training. ValueError if they are on several machines.
    """

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self.rank, self.size = int(environment.get("RANK", 0)), int(environment.get("WORLD_SIZE", 1))
        self._gathered = 0
        if self.size > 1:
            store, _, _ = next(dist.rendezvous("env://", self.rank, self.size))
            self._store = dist.PrefixStore("fastmaxsim", store)
            if len(set(self.gather(socket.gethostname()))) > 1:
                raise ValueError(SEVERAL_MACHINES)

    def gather(self, value: Any) -> list[Any]:
        """The values of all processes, by rank; what JSON can hold. To be called in the same order in each."""
        if self.size == 1:
            return [value]
        self._gathered += 1
        self._store.set(f"{self._gathered}/{self.rank}", json.dumps(value))
        return [self._wait_for(f"{self._gathered}/{rank}") for rank in range(self.size)]

    def _wait_for(self, key: str) -> Any:
        # Not in the store, which would not hear a signal that ends this process.
        while not self._store.check([key]):
            time.sleep(_POLL_SECONDS)
        return json.loads(self._store.get(key))

    def require_memory_elsewhere(self) -> None:
        """OutOfMemoryElsewhere if the process of another rank, for which that of this one would wait, is out of memory."""
        for rank in range(self.size):
            key = f"{self._gathered + 1}/{rank}"
            if self.size > 1 and self._store.check([key]) and json.loads(self._store.get(key)) == OUT_OF_MEMORY:
                raise OutOfMemoryElsewhere

    def environment(self) -> dict[str, str]:
        """Environment variables by which the processes of one run meet each other, and nobody else.

        For each run the launcher's address would be that of the other runs too.
        """
        variables = dict(os.environ)
        if self.size > 1:
            with socket.socket() as found:
                found.bind(("127.0.0.1", 0))
                free = found.getsockname()[1]
            [port, *_] = self.gather(free)
            variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            variables.pop("TORCHELASTIC_USE_AGENT_STORE", None)
        return variables
