"""Ids that users give to the documents of an index, in memory and as lines of a file."""

import json
from collections.abc import Iterable, Set

import torch
from torch import Tensor

from pylate_fastmaxsim._checks import require_integer

Id = str | int


class Ids:
    """Ids of the documents of an index: ``all`` by position, also of those that are removed, which ``removed`` names."""

    def __init__(self, all: Iterable[Id] = (), removed: Set[int] = frozenset()) -> None:
        self.all = [*all]
        # Of those that are not removed, ascending.
        self.positions = {each: at for at, each in enumerate(self.all) if at not in removed}

    def append(self, ids: list[Id]) -> None:
        """Add documents, in the place of those with the same ids."""
        for at, each in enumerate(ids, len(self.all)):
            self.positions.pop(each, None)  # so that positions ascend
            self.positions[each] = at
        self.all += ids

    def require_new(self, where: str, ids: list[Id], update: str) -> None:
        """Raise ValueError, which names the method that replaces documents, if one is in the index."""
        known = next((each for each in ids if each in self.positions), None)
        if known is not None:
            raise ValueError(f"{where}: the id {known!r} is in the index; {update} replaces documents.")

    def positions_of(self, where: str, ids: Iterable[Id]) -> Tensor:
        """Positions int64 ``[n]`` on the CPU; ValueError if an id is not in the index."""
        try:
            return torch.tensor([self.positions[each] for each in ids], dtype=torch.int64, device="cpu")
        except KeyError as error:
            raise ValueError(f"{where}: the id {error.args[0]!r} is not in the index.") from None


def as_ids(where: str, ids: Id | Iterable[Id]) -> list[Id]:
    """One id or several as a list. TypeError if one is neither a string nor an integer, ValueError if one is given twice."""
    ids = [ids] if isinstance(ids, (str, int)) else [*ids]
    ids = [each if isinstance(each, str) else require_integer(f"{where}: an id", each, " or a string") for each in ids]
    if len(seen := set(ids)) < len(ids):
        twice = next(each for each in ids if each not in seen or seen.remove(each))
        raise ValueError(f"{where}: the id {twice!r} is given twice.")
    return ids


def to_lines(ids: Iterable[Id]) -> bytes:
    """Each in JSON, on a line."""
    return "".join(json.dumps(each) + "\n" for each in ids).encode()


def from_lines(lines: Tensor) -> list[Id]:
    """The ids of what :func:`to_lines` made, as a tensor of uint8."""
    return json.loads(b"[%s]" % lines.numpy().tobytes().strip().replace(b"\n", b","))
