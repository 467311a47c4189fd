"""The concentration of gradients on few document tokens, logged while a model is trained."""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState

from pylate_fastmaxsim.diagnostics.gradient_concentration import gradient_concentration
from pylate_fastmaxsim.ops.pooled import pooled_scores
from pylate_fastmaxsim.pooling import Max, Pooling
from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.models.retriever import Retriever
from pylate_fastmaxsim.tokens import TokenBatch


def encode_pairs(retriever: Retriever, queries: list[str], documents: list[Any]) -> tuple[TokenBatch, TokenBatch]:
    """Token embeddings of queries and of their positives, each in one batch; leaves the model in evaluation."""
    size = len(queries)
    return retriever.encode(queries, size, is_query=True), retriever.encode(documents, size, is_query=False)


class LogGradientConcentration(TrainerCallback):
    """Logs how the gradient is spread over document tokens, before the first step and after every n-th.

    The same pairs are encoded each time, without gradients and in the precision of the training, so that figures of a run
    compare with each other. That is a part of one step's forward in every n steps, and the training stays the same bit
    by bit. What is logged is documented in docs/compare.md#gradient-concentration.

    Parameters
    ----------
    trainer
        The trainer that logs, of transformers or of a library built on it.
    encode
        Returns token embeddings of N queries and of their N positives, as TokenBatches or padded ``[N, L, d]``.
    every
        Steps of the optimizer from one measurement to the next.
    pooling
        That of the training, or a function that returns it where it changes.
    temperature
        That of the contrastive loss with in-batch negatives whose gradient is measured beside that of the scores of the
        pairs. ``None``: only of the scores.

    Raises
    ------
    RecipeError
        At the start of a training under FSDP or DeepSpeed, where no process has the whole model.

    Examples
    --------
    docs/compare.md#gradient-concentration has it in a script of PyLate.
    """

    def __init__(
        self,
        trainer: Trainer,
        encode: Callable[[], tuple[TokenBatch | Tensor, TokenBatch | Tensor]],
        every: int,
        pooling: Pooling | Callable[[], Pooling] = Max(),
        temperature: float | None = 1.0,
    ) -> None:
        self._trainer = trainer
        self._encode = encode
        self._every = every
        self._pooling = pooling
        self._temperature = temperature

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        if self._trainer.is_fsdp_enabled or self._trainer.is_deepspeed_enabled:
            raise RecipeError(
                "Gradient concentration is not logged under FSDP and DeepSpeed, where no process has the whole model; leave "
                "LogGradientConcentration, in a recipe training.log_gradient_concentration, out."
            )
        if state.global_step == 0:
            self._log(state, control)

    def on_step_end(self, args, state, control, **kwargs) -> None:
        if state.global_step % self._every == 0:
            self._log(state, control)

    def _log(self, state: TrainerState, control: TrainerControl) -> None:
        if not state.is_world_process_zero:
            return
        with torch.no_grad(), self._trainer.compute_loss_context_manager():
            queries, documents = self._encode()
            figures = self._figures(queries, documents)
        # Logging clears the flag by which the trainer logs its loss after this step.
        should_log = control.should_log
        self._trainer.log(figures)
        control.should_log = should_log

    def _figures(self, queries: TokenBatch | Tensor, documents: TokenBatch | Tensor) -> dict[str, float]:
        targets = torch.arange(len(queries), device=queries.device)
        pooling = self._pooling() if callable(self._pooling) else self._pooling
        measured = [gradient_concentration(queries, documents, targets[:, None], pooling=pooling)]
        if self._temperature is not None:
            scores = pooled_scores(queries, documents, pooling=pooling)
            with torch.enable_grad():
                leaf = scores.detach().requires_grad_()
                (gradient,) = torch.autograd.grad(F.cross_entropy(leaf / self._temperature, targets), leaf)
            measured.append(gradient_concentration(queries, documents, pooling=pooling, loss_gradient=gradient))
        return {
            f"gradient_concentration/{of}_{name}": value
            for figures in map(asdict, measured)
            for of in [figures.pop("of")]
            for name, value in figures.items()
            if name != "ginis"
        }
