"""What a step of training was made of."""

from __future__ import annotations

from typing import Any

import torch


class Counted:
    """Gives a trainer that it is mixed into ``measured``: the loss and the tokens of the current step.

    The trainer says in ``count`` what a batch holds. ``encoded`` are the tokens that the encoder was given, so it
    includes padding and leaves out what was packed away.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.measured: dict[str, Any] = {}
        self.start_step()

    def start_step(self) -> None:
        self.measured = {"loss": 0.0, "documents": 0, "live": 0, "query_tokens": 0, "encoded": 0}

    def stop_counting(self) -> None:
        """Undo what the trainer did to the model in order to count, if anything."""

    def training_step(self, model: torch.nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        self.count(inputs)
        loss = super().training_step(model, inputs, *args, **kwargs)
        self.measured["loss"] += loss.detach()
        return loss
