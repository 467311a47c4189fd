"""Count the tokens of a training step."""

from __future__ import annotations

from typing import Any

import torch

from pylate_fastmaxsim.recipes.kind import Kind


class Counted:
    """Mixin for trainers: ``measured`` holds the loss and the numbers of tokens of the current step.

    ``encoded`` is how many tokens the encoder was given, padding included; what GradCache encodes without gradients first
    is not counted twice.
    """

    kind: Kind

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.measured: dict[str, Any] = {}
        self.start_step()
        if (module := self.kind.counted_module(self.model)) is not None:
            self.stop_counting = module.register_forward_pre_hook(self._count_encoded, with_kwargs=True).remove

    def start_step(self) -> None:
        self.measured = {"loss": 0.0, "documents": 0, "live": 0, "query_tokens": 0, "encoded": 0}

    def stop_counting(self) -> None:
        """Remove the hooks of the trainer, if it has any."""

    def training_step(self, model: torch.nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        for name, count in self.kind.count(self, inputs).items():
            self.measured[name] += count
        loss = super().training_step(model, inputs, *args, **kwargs)
        self.measured["loss"] += loss.detach()
        return loss

    def _count_encoded(self, module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if torch.is_grad_enabled():
            self.measured["encoded"] += (args[0] if args else kwargs["input_ids"]).numel()
