"""GradCache for colpali-engine: its losses over batches of pages that do not fit at once."""

from collections.abc import Callable
from functools import partial

import torch
from colpali_engine.trainer.contrastive_trainer import ContrastiveTrainer
from torch import Tensor, nn

from pylate_fastmaxsim._checks import require_count
from pylate_fastmaxsim.integrations.encoding.gradcache import first_pass, with_second_passes
from pylate_fastmaxsim.integrations.encoding.plans import mini_batches
from pylate_fastmaxsim.integrations.models.wrappers import StandIn, unwrap


class GradCache:
    """A model of colpali-engine for one training step, which embeds in mini-batches and keeps no activations.

    Call it as the model, compute any loss of what it returns, and take that to :meth:`with_second_passes` before
    ``backward()``. Loss and gradients are those of the whole batch; each mini-batch is embedded twice.

    Parameters
    ----------
    model
        The model, possibly wrapped by PEFT, DistributedDataParallel or both.
    mini_batch_size
        Queries or pages in a call of the model.

    Raises
    ------
    ValueError
        ``mini_batch_size`` is below 1.
    TypeError
        ``mini_batch_size`` is no integer.

    Examples
    --------
    A training step by hand::

        cached = GradCache(model, mini_batch_size=4)
        loss = ColbertLoss()(cached(**queries), cached(**pages))
        cached.with_second_passes(loss).backward()
    """

    def __init__(self, model: nn.Module, mini_batch_size: int) -> None:
        self._model = model
        self._size = require_count("GradCache", "mini_batch_size", mini_batch_size)
        self._second_passes: list[Callable[[], Tensor]] = []
        self._embeddings: list[Tensor] = []
        # Models of Qwen keep the offsets of the last images, for a text of the next call with as many rows.
        self._with_offsets = [module for module in unwrap(model).modules() if hasattr(module, "rope_deltas")]

    def __call__(self, **inputs: Tensor) -> Tensor:
        """Embeddings ``[N, L, d]`` of N texts or pages, from a processor's inputs, each of N rows."""
        count = len(inputs["input_ids"])
        for name, value in inputs.items():
            if isinstance(value, Tensor) and value.shape[:1] != (count,):
                raise ValueError(
                    f"GradCache: {name} must have one row for each of the {count} texts or pages of input_ids, got "
                    f"shape {tuple(value.shape)}."
                )
        made = [first_pass(partial(self._embed, part), part) for part in mini_batches(inputs, self._size)]
        embeddings = torch.cat([part for part, _ in made])
        if torch.is_grad_enabled():
            self._second_passes += [second_pass for _, second_pass in made]
            self._embeddings.append(embeddings.requires_grad_())
        return embeddings

    def with_second_passes(self, loss: Tensor) -> Tensor:
        """The loss, whose ``backward()`` embeds all mini-batches again with gradients.

        ``loss`` is a scalar and a function of all embeddings that were asked for. It is differentiated here.
        """
        if not torch.is_grad_enabled():
            return loss
        loss.backward()
        gradients = [part for each in self._embeddings for part in each.grad.split(self._size)]
        return with_second_passes(loss, self._model, self._second_passes, gradients)

    def _embed(self, inputs: dict[str, Tensor]) -> Tensor:
        for module in self._with_offsets:
            module.rope_deltas = None
        return self._model(**inputs)


class GradCacheTrainer(ContrastiveTrainer):
    """colpali-engine's ``ContrastiveTrainer`` with GradCache: any of its losses, images, negatives, several processes.

    Parameters
    ----------
    mini_batch_size
        Queries, pages or negatives in a call of the model. ``per_device_train_batch_size`` is then what the loss sees.
    *args, **kwargs
        As ``ContrastiveTrainer``.

    Raises
    ------
    ValueError
        ``mini_batch_size`` is below 1.
    TypeError
        ``mini_batch_size`` is no integer.

    Examples
    --------
    In the place of ``ContrastiveTrainer``::

        trainer = GradCacheTrainer(
            model=model,
            args=TrainingArguments("output", per_device_train_batch_size=64, ...),
            train_dataset=train_dataset,
            eval_dataset=None,
            data_collator=VisualRetrieverCollator(processor),
            loss_func=ColbertLoss(),
            is_vision_model=True,
            mini_batch_size=8,
        )
    """

    def __init__(self, *args, mini_batch_size: int, **kwargs) -> None:
        self.mini_batch_size = require_count("GradCacheTrainer", "mini_batch_size", mini_batch_size)
        super().__init__(*args, **kwargs)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        cached = GradCache(model, self.mini_batch_size)
        found = super().compute_loss(StandIn(model, cached), inputs, return_outputs, num_items_in_batch)
        if return_outputs:
            return cached.with_second_passes(found[0]), *found[1:]
        return cached.with_second_passes(found)
