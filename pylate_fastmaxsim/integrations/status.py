"""What is accelerated in this process: libraries, options, and how each model was encoded that was called."""

from __future__ import annotations

from dataclasses import dataclass

from pylate_fastmaxsim.integrations.options import Options


@dataclass(frozen=True)
class Status:
    """What :func:`~pylate_fastmaxsim.status` found. As text it is what a user reads.

    Attributes
    ----------
    options
        The options in force; None while nothing is accelerated.
    libraries
        A sentence for each gain: the libraries that have it, and functions of theirs that are left as they are.
    models
        By the class of a model or a loss, what its first batch decided: packed, grouped or padded, and why. A model that
        has not been called, or whose batches are as stock makes them by its options, is not there.
    """

    options: Options | None
    libraries: list[str]
    models: dict[str, list[str]]

    @property
    def decisions(self) -> list[str]:
        """A line for each of ``models``."""
        return [f"{name}: {line}" for name, said in self.models.items() for line in said]

    def __str__(self) -> str:
        if self.options is None:
            return "pylate-fastmaxsim: off"
        lines = [f"pylate-fastmaxsim: {'; '.join(self.libraries) or 'nothing is accelerated'}"]
        return "\n".join([*lines, *(f"  {line}" for line in self.decisions)])
