"""The processes of a launcher, each of which compares its own share of a distributed training."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from pylate_fastmaxsim.comparison.turns import OUT_OF_MEMORY, OutOfMemoryElsewhere

SEVERAL_MACHINES = (
    "compare measures on one machine, and this launcher starts processes on several; start it with those of one."
)

_POLL_SECONDS = 0.005


class Ranks:
    """The processes that a launcher started on this machine; one alone where there is no launcher.

    Examples
    --------
    >>> from pylate_fastmaxsim.comparison.ranks import Ranks
    >>> alone = Ranks({})
    >>> alone.rank, alone.size, alone.gather("here")
    (0, 1, ['here'])
    """

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        """Read ``RANK`` and ``WORLD_SIZE``, and meet the other processes.

        Raises
        ------
        ValueError
            They are on several machines.
        """
        self.rank, self.size = (
            int(environment.get(name, default)) for name, default in (("RANK", 0), ("WORLD_SIZE", 1))
        )
        self._gathered = 0
        if self.size == 1:
            return
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
        """See whether the process of another rank, for which that of this one would wait, is out of memory.

        Raises
        ------
        OutOfMemoryElsewhere
            It is.
        """
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
            [port, *_] = self.gather(_free_port())
            variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            variables.pop("TORCHELASTIC_USE_AGENT_STORE", None)
        return variables


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]
