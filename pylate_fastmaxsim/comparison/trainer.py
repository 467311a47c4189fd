"""The steps of a Trainer of transformers, measured: each goes through a gate, with its loss and numbers of tokens."""

from __future__ import annotations

from collections import Counter
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

    training_step = trainer.training_step
    measured = Counter()  # of a step, which may have several batches

    def counted_step(model: torch.nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        for name, number in count(inputs).items():
            measured[name] += number
        loss = training_step(model, inputs, *args, **kwargs)
        measured["loss"] += loss.detach()
        return loss

    def count_encoded(module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        # GradCache encodes without gradients first, which is not counted twice.
        if torch.is_grad_enabled():
            measured["encoded"] += (args[0] if args else kwargs["input_ids"]).numel()

    trainer.training_step = counted_step
    hook = None if encoder is None else encoder.register_forward_pre_hook(count_encoded, with_kwargs=True)

    class Measure(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs) -> None:
            gate.before_step()

        def on_step_end(self, args, state, control, **kwargs) -> None:
            control.should_save = control.should_evaluate = False
            gate.after_step(**measured, of=state.max_steps)
            measured.clear()

        def on_epoch_end(self, args, state, control, **kwargs) -> None:
            control.should_save = control.should_evaluate = False

        def on_train_end(self, args, state, control, **kwargs) -> None:
            if hook is not None:
                hook.remove()
            gate.steps_done()

    trainer.add_callback(Measure())


def embeddings_of(model: torch.nn.Module) -> torch.nn.Module | None:
    """The module that looks up the tokens of an encoder of transformers; None where a model has no such encoder."""
    from transformers import PreTrainedModel

    encoder = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
    # Of two routes only one may encode.
    is_routed = any(type(module).__name__ == "Router" for module in model.children())
    return None if encoder is None or is_routed else encoder.get_input_embeddings()


def count_tokens(inputs: Any, padded: bool = True, encoded: bool = True) -> dict[str, Any]:
    """Numbers of a batch from its columns of tokens, of which the first are queries, encoded with padding if ``padded``.

    ``encoded``: what the encoder is given is as long as the columns; else it is counted elsewhere.
    """
    inputs = inputs if isinstance(inputs, Mapping) else {}  # a collator of the user's own may return a list
    columns = [name.removesuffix("input_ids") for name in inputs if name.endswith("input_ids")]
    counted = [numbers for column in columns if (numbers := _count_column(inputs, column)) is not None]
    if len(counted) < 2:
        return {}
    texts, live, sizes = zip(*counted, strict=True)
    numbers = {"documents": sum(texts[1:]), "live": sum(live[1:]), "query_tokens": sizes[0] if padded else live[0]}
    return numbers | ({"encoded": sum(sizes)} if encoded else {})


def _count_column(inputs: Mapping[str, Any], column: str) -> tuple[int, Any, int] | None:
    """Numbers of texts, of their tokens, those of query expansion included, and of tokens with padding; None without masks."""
    ids = inputs[f"{column}input_ids"]
    if f"{column}cu_seq_lens_q" in inputs:  # with FlashAttention Sentence Transformers writes one text after the other
        return len(inputs[f"{column}cu_seq_lens_q"]) - 1, ids.numel(), ids.numel()
    if (live := inputs.get(f"{column}attention_mask")) is None:
        return None
    if (expanded := inputs.get(f"{column}query_expansion_positions")) is not None:
        live = live.bool() | expanded.bool()
    return live.shape[:-1].numel(), live.sum(), live.numel()
