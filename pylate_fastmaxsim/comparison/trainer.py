"""The steps of a Trainer of transformers, measured: each goes through a gate, with its loss and numbers of tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from pylate_fastmaxsim.comparison.gate import Gate

if TYPE_CHECKING:
    from transformers import Trainer


def measure_steps(
    trainer: Trainer,
    gate: Gate,
    count: Callable[[Any], dict[str, Any]],
    encoder: torch.nn.Module | None = None,
) -> None:
    """Have a Trainer that begins to train take its steps by turns, and neither save nor evaluate.

    ``count`` gives numbers of a batch: ``documents``, tokens of them that are ``live``, ``query_tokens``, perhaps
    ``encoded``: tokens that the encoder is given, padding included. Else these are the inputs of the module ``encoder``.
    """
    from transformers import TrainerCallback

    step = _CountedStep(trainer.training_step, count)
    trainer.training_step = step
    hook = None if encoder is None else encoder.register_forward_pre_hook(step.count_encoded, with_kwargs=True)

    class Measure(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs) -> None:
            gate.before_step()

        def on_step_end(self, args, state, control, **kwargs) -> None:
            control.should_save = control.should_evaluate = False
            gate.after_step(of=state.max_steps, **step.take())

        def on_epoch_end(self, args, state, control, **kwargs) -> None:
            control.should_save = control.should_evaluate = False

        def on_train_end(self, args, state, control, **kwargs) -> None:
            if hook is not None:
                hook.remove()
            gate.steps_done()

    trainer.add_callback(Measure())


def count_tokens(inputs: Any, padded: bool = True) -> dict[str, Any]:
    """Numbers of a batch from the masks of its columns, of which the first are queries.

    What the encoder is given is as long as the masks where it encodes texts ``padded``, and else unknown.
    """
    columns = inputs if isinstance(inputs, Mapping) else {}  # a collator of the user's own may return a list
    masks = [mask for name, mask in columns.items() if name.endswith("attention_mask")]
    if len(masks) < 2:
        return {}
    queries, *documents = masks
    found = {
        "documents": sum(mask.shape[:-1].numel() for mask in documents),
        "live": sum(mask.sum() for mask in documents),
    }
    if padded:
        found |= {"encoded": sum(mask.numel() for mask in masks), "query_tokens": queries.numel()}
    return found


class _CountedStep:
    """A Trainer's ``training_step`` that keeps the loss and the numbers of a step."""

    def __init__(self, training_step: Callable[..., torch.Tensor], count: Callable[[Any], dict[str, Any]]) -> None:
        self.training_step = training_step
        self.count = count
        self.measured: dict[str, Any] = {}

    def __call__(self, model: torch.nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        for name, number in self.count(inputs).items():
            self._add(name, number)
        loss = self.training_step(model, inputs, *args, **kwargs)
        self._add("loss", loss.detach())
        return loss

    def count_encoded(self, module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        # GradCache encodes without gradients first, which is not counted twice.
        if torch.is_grad_enabled():
            self._add("encoded", (args[0] if args else kwargs["input_ids"]).numel())

    def take(self) -> dict[str, Any]:
        """The sums since the last call: a step may have several batches."""
        measured, self.measured = self.measured, {}
        return measured

    def _add(self, name: str, number: Any) -> None:
        self.measured[name] = self.measured.get(name, 0) + number
