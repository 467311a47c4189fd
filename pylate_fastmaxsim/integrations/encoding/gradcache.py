"""GradCache: the second pass encodes as the first did, in the same precision.

Where ``backward()`` is called outside of autocast, Sentence Transformers makes the second pass in float32, whose
embeddings are not those that the cached gradients belong to. Without padding, dropout would be drawn differently as well.

The second pass reuses what the first found out about its texts. So it does not wait for the device, and the host launches
a mini-batch while the backward of the last is still running.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import lru_cache, wraps
from typing import TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import get_device_states, set_device_states

from pylate_fastmaxsim.integrations.encoding.masks import writes_to
from pylate_fastmaxsim.integrations.models.context import setting
from pylate_fastmaxsim.integrations.models.wrappers import no_grad_sync
from pylate_fastmaxsim.integrations.options import current_options
from pylate_fastmaxsim.integrations.patching.patches import Patch, detached

Found = TypeVar("Found")


class _Recording:
    """Findings and autocast of the first pass over some texts, which the second pass has again."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        device = tensors[0].device.type
        self._autocast = {
            "device_type": device,
            "dtype": torch.get_autocast_dtype(device),
            "enabled": torch.is_autocast_enabled(device),
            # Up to PyTorch 2.10 a backward inside autocast would reuse the weights that the first pass cast without
            # gradients.
            "cache_enabled": False,
        }
        self._writes = sum(map(writes_to, tensors))
        self.found: list[object] = []
        self.texts_changed = False

    @contextmanager
    def again(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Context of the second pass over the same texts."""
        self.texts_changed = sum(map(writes_to, tensors)) != self._writes
        with setting(_pass, (self, iter(self.found))), torch.autocast(**self._autocast):
            yield


# The recording of the mini-batch that is encoded; in the second pass also what is left of what the first one found.
_pass: ContextVar[tuple[_Recording, Iterator | None] | None] = ContextVar("pass", default=None)

# By the random numbers that the second pass is to draw again.
_recordings: WeakKeyDictionary[object, _Recording] = WeakKeyDictionary()

_NOTHING = object()


def replay(find: Callable[[], Found], of_texts: bool = False) -> Found:
    """The answer of the first pass over some texts to the same question, in the order of the questions, or a new one.

    Answers are ``of_texts`` that do not hold any more once somebody has written to the texts in between.
    """
    if not inside():
        return find()
    recording, answers = _pass.get()
    if answers is None:
        recording.found.append(found := find())
        return found
    found = next(answers, _NOTHING)
    return find() if found is _NOTHING or (of_texts and recording.texts_changed) else found


def inside() -> bool:
    """True while a mini-batch is encoded, which is to have a backward of its own."""
    return _pass.get() is not None


def two_passes(
    loss_class: type,
    check: Callable[[nn.Module], None] = lambda loss: None,
    advise: Callable[[nn.Module, dict, list[object]], None] = lambda loss, features, found: None,
) -> list[Patch]:
    """Replacements of ``embed_minibatch`` of a loss, whose second pass over some texts encodes as the first did.

    ``check`` is called with the loss before each first pass, and ``advise`` after it with the loss, the texts of the whole
    column, and what was found out about those encoded.
    """
    stock = detached(loss_class.embed_minibatch)
    parameters = inspect.signature(stock)

    @wraps(stock)
    def embed_minibatch(self: nn.Module, *args, **kwargs) -> tuple:
        given = parameters.bind(self, *args, **kwargs).arguments
        state = given.get("random_state")
        tensors = _tensors(given["sentence_feature"].values())
        if state is not None and state in _recordings:
            with _recordings[state].again(tensors):
                return stock(self, *args, **kwargs)
        if state is not None or current_options() is None:
            return stock(self, *args, **kwargs)
        check(self)
        first = _Recording(tensors)
        with setting(_pass, (first, None)):
            *embedded, state = stock(self, *args, **kwargs)
        if state is not None:
            _recordings[state] = first
            advise(self, given["sentence_feature"], first.found)
        return *embedded, state

    return [Patch(loss_class, "embed_minibatch", embed_minibatch), *_minibatch_patches()]


def first_pass(embed: Callable[[], Tensor], features: Mapping[str, object]) -> tuple[Tensor, Callable[[], Tensor]]:
    """Embeddings without gradients, and what makes them with gradients, from the same random numbers and precision.

    ``embed`` makes one call of a model and returns embeddings ``[..., d]``. The tensors in ``features``, which the model is
    given, say on which devices random numbers are drawn.
    """
    tensors = _tensors(features.values())
    cpu_state, (devices, states) = torch.get_rng_state(), get_device_states(*tensors)
    recording = _Recording(tensors)

    def second_pass() -> Tensor:
        with torch.random.fork_rng(devices), torch.enable_grad(), recording.again(tensors):
            torch.set_rng_state(cpu_state)
            set_device_states(devices, states)
            return _wide(embed())

    with torch.no_grad(), setting(_pass, (recording, None)):
        return _wide(embed()), second_pass


def with_second_passes(
    loss: Tensor, model: nn.Module, passes: Sequence[Callable[[], Tensor]], gradients: Sequence[Tensor]
) -> Tensor:
    """A loss whose ``backward()`` makes the second passes, and goes on from the gradients of their embeddings.

    The ``loss`` is a scalar, already differentiated by what the first passes returned: ``gradients`` in any shape. The
    ``passes`` are all of the step, in the order of the first ones; ``model`` is what they call, possibly wrapped.
    """

    def second_passes(grad_output: Tensor) -> None:
        for second_pass, gradient in zip(passes, gradients, strict=True):
            # Once a step and not once a pass: ranks send each other the gradients of all weights.
            with nullcontext() if second_pass is passes[-1] else no_grad_sync(model):
                embeddings = second_pass()
                embeddings.backward(gradient.view_as(embeddings) * grad_output)

    loss = loss.detach().requires_grad_()
    loss.register_hook(second_passes)
    return loss


def losses_of_chunks(
    values: Tensor, count: int, chunks: Iterable[slice], loss_of: Callable[[slice, Tensor], Tensor]
) -> list[Tensor]:
    """Losses of chunks of ``count`` queries against all documents; with gradients enabled each adds its own to the leaves.

    ``loss_of`` is given a chunk and the documents' ``values [T, d]``: a copy, so that what these were made from, as by an
    exchange with other ranks, is differentiated once and not per chunk.
    """
    with_backward = torch.is_grad_enabled()
    leaf = values.detach().requires_grad_(with_backward)
    losses, gradient = [], None
    for chunk in chunks:
        loss = loss_of(chunk, leaf)
        if with_backward:
            loss.backward()
            # In 16 bits each chunk's gradient is rounded anyway, but their sum need not be.
            # Nothing is held longer than needed: each of these is as large as all documents.
            part, leaf.grad = leaf.grad, None
            if gradient is None:
                is_all = chunk.stop >= count
                gradient = part if is_all else part.to(torch.promote_types(part.dtype, torch.float32))
            else:
                gradient.add_(part)
            del part
        losses.append(loss.detach())
    if with_backward:
        values.backward(gradient.to(values.dtype))
    return losses


def _wide(embeddings: Tensor) -> Tensor:
    # Their gradient waits in their dtype, and the scale that a GradScaler gives it comes only in backward().
    return embeddings.float() if embeddings.dtype == torch.float16 else embeddings


def _tensors(values: Iterable[object]) -> list[Tensor]:
    return [value for value in values if isinstance(value, Tensor)]


@lru_cache(maxsize=1)
def _minibatch_patches() -> tuple[Patch, ...]:
    """Replacements in releases that cut mini-batches to their longest text, which waits for the device."""
    try:
        from sentence_transformers.base.losses import gradcache
    except ImportError:  # before release 5.7
        return ()
    stock = detached(gradcache._create_minibatch)

    @wraps(stock)
    def create_minibatch(*args, **kwargs) -> dict[str, object]:
        if not inside():  # of other losses
            return stock(*args, **kwargs)
        # A copy, because whoever encodes texts adds to them.
        return dict(replay(lambda: dict(stock(*args, **kwargs)), of_texts=True))

    return (Patch(gradcache, "_create_minibatch", create_minibatch),)
