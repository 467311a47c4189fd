"""The columns of a loss of Sentence Transformers in one call of a packed encoder.

These losses encode their queries and then their documents. With small batches a GPU waits for the host, which launches
every layer once per call. So the call for the queries encodes the documents as well, and later calls take theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import wraps

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pylate_fastmaxsim.integrations.encoding.batch import Documents
from pylate_fastmaxsim.integrations.encoding.modes import MOST_TOKENS_BESIDE_QUERIES
from pylate_fastmaxsim.integrations.models.context import setting
from pylate_fastmaxsim.integrations.models.user_code import has_class_forward, has_user_hooks
from pylate_fastmaxsim.integrations.models.wrappers import layers_of_wrapping
from pylate_fastmaxsim.integrations.options import current_options

Features = dict[str, Tensor]


class LossColumns:
    """The columns of a loss that is running. A kind of encoder adds what it keeps of those encoded already.

    ``model`` is what the loss calls, possibly wrapped.
    """

    def __init__(self, model: nn.Module, columns: Sequence[Features]) -> None:
        self.columns = columns
        self._model = model

    def behind(self, features: Features) -> Sequence[Features]:
        """The columns of documents if ``features`` are the queries, else none."""
        queries = self.columns[0]
        are_queries = all(features.get(key) is queries.get(key) for key in ("input_ids", "attention_mask"))
        return self.columns[1:] if are_queries else ()

    def reason_apart(self, model: nn.Module, *modules: nn.Module, known: tuple[type[nn.Module], ...]) -> str | None:
        """What may change documents before their own call, so that they must not be encoded earlier.

        Parameters
        ----------
        model
            The model that runs.
        modules
            Those that it begins with, whose calls are left out for the documents.
        known
            The classes that these may have.
        """
        *around, core = layers_of_wrapping(self._model)
        for layer in around:
            if not isinstance(layer, DistributedDataParallel):
                return f"{type(layer).__name__} is around the model"
        if core is not model or list(model.children())[: len(modules)] != list(modules):
            return "the model does not begin with the encoder"
        for module in (model, *modules):
            # A subclass may have a __call__ or a forward of its own.
            if type(module) not in known:
                return f"{type(module).__name__} is a class of your own"
            if not has_class_forward(module) or has_user_hooks(module):
                return f"a hook or another forward is on {type(module).__name__}"
        return None


_columns: ContextVar[LossColumns | None] = ContextVar("columns", default=None)


def current() -> LossColumns | None:
    """The columns of the loss that is running."""
    return _columns.get()


def noted(columns: LossColumns) -> AbstractContextManager[None]:
    """Context in which :func:`current` returns these columns."""
    return setting(_columns, columns)


def are_few(texts: Documents) -> bool:
    """Whether there are tokens, but so few that another call would leave a GPU waiting for the host."""
    return 0 < len(texts.token_index) <= MOST_TOKENS_BESIDE_QUERIES


def in_force(tensor: Tensor) -> tuple[bool, bool]:
    """Whether gradients are computed, and whether in autocast. What was encoded otherwise is not taken."""
    return torch.is_grad_enabled(), torch.is_autocast_enabled(tensor.device.type)


def noting(
    stock: Callable, kind: type[LossColumns], check: Callable[[nn.Module], None] = lambda loss: None
) -> Callable:
    """The forward of a loss that notes its columns, as this kind, after a ``check`` of the loss."""

    @wraps(stock)
    def forward(self: nn.Module, sentence_features: Iterable[Features], *args, **kwargs) -> Tensor:
        if torch.compiler.is_compiling() or current_options() is None:
            return stock(self, sentence_features, *args, **kwargs)
        check(self)
        columns = list(sentence_features)
        with noted(kind(self.model, columns)):
            return stock(self, columns, *args, **kwargs)

    return forward
