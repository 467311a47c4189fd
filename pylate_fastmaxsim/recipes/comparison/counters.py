"""Count the tokens of a training step."""

from __future__ import annotations

from typing import Any

import torch


class Counted:
    """Mixin for trainers: ``measured`` holds the loss and the numbers of tokens of the current step.

    The trainer implements ``count``. ``encoded`` is how many tokens the encoder was given, padding included.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.measured: dict[str, Any] = {}
        self.start_step()

    def start_step(self) -> None:
        self.measured = {"loss": 0.0, "documents": 0, "live": 0, "query_tokens": 0, "encoded": 0}

    def stop_counting(self) -> None:
        """Remove the hooks of the trainer, if it has any."""

    def training_step(self, model: torch.nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        self.count(inputs)
        loss = super().training_step(model, inputs, *args, **kwargs)
        self.measured["loss"] += loss.detach()
        return loss
