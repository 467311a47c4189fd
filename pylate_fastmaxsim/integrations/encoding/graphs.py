"""Small batches: forward and backward of an encoder without padding as CUDA graphs.

A step of few texts waits for the host, which launches a thousand kernels. As graphs they are launched at once. A graph
has fixed sizes, so that batches are filled up to one of a few sizes by texts whose states nobody reads. Other texts do
not see them, and their gradients are zero.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple
from weakref import WeakSet, ref

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from pylate_fastmaxsim.integrations.compilation.layers import (
    can_be_traced,
    checkpointed_layers,
    has_compiled_layers,
)
from pylate_fastmaxsim.integrations.encoding import gradcache
from pylate_fastmaxsim.integrations.encoding.attention import is_packed_mask, packed_mask
from pylate_fastmaxsim.integrations.log import log_once
from pylate_fastmaxsim.integrations.models.encoders import encoder_of
from pylate_fastmaxsim.integrations.models.user_code import has_global_hooks, has_hooks
from pylate_fastmaxsim.integrations.models.wrappers import sharded_by_fsdp, unwrap
from pylate_fastmaxsim.integrations.patching.known_sources import defined_in

# With more tokens the GPU is busy while the host launches.
MOST_TOKENS = 2**14

# Sizes differ by 3 to 6%: a batch size meets four or five of them.
MOST_GRAPHS = 16

_WITHOUT = "Small batches do not run as CUDA graphs, so that the GPU waits for the host: %s."

_installed: WeakSet[nn.Module] = WeakSet()


class Size(NamedTuple):
    """Sizes that a graph is made for: rows of the encoder's input, texts with those that fill up, and a bound on their length."""

    tokens: int
    texts: int
    longest: int

    @classmethod
    def smallest_for(cls, tokens: int, texts: int, longest: int) -> Size:
        """The smallest size that holds a batch.

        Examples
        --------
        >>> Size.smallest_for(tokens=5475, texts=128, longest=180)
        Size(tokens=5632, texts=192, longest=256)
        """
        # What is compiled for a size of 1 or of a head's dimensions holds for that size alone.
        longest = max(256, 2 ** (longest - 1).bit_length())
        step = max(64, 2 ** (tokens - 1).bit_length() // 32)
        rows = -(-tokens // step) * step
        return cls(rows, -(-(texts + -(-(rows - tokens) // longest)) // 64) * 64, longest)

    def borders(self, borders: Tensor, tokens: int) -> Tensor:
        """``cu_seqlens`` of a batch ``[..., N + 1]`` with texts that fill it up, ``[..., texts + 1]``."""
        more = self.texts + 1 - borders.shape[1]
        ends = torch.arange(1, more + 1, device=borders.device, dtype=borders.dtype) * self.longest + tokens
        return torch.cat([borders, ends.clamp_(max=self.tokens).expand(len(borders), -1)], dim=1)


class Replays(NamedTuple):
    """An encoder's forward and backward for one size."""

    # Compute `states` from the inputs, and the gradients of all weights from `gradient`.
    forward: Callable[[], None]
    backward: Callable[[], None]
    # [1, tokens, d]
    states: Tensor
    gradient: Tensor
    # Which weights have a gradient.
    used: list[bool]


def install(model: nn.Module) -> None:
    """Have the encoder of a model whose layers are compiled run small batches as CUDA graphs.

    An encoder that the user compiled is left as it is, and so is one whose weights FSDP divides.
    """
    if not has_compiled_layers(model):
        return
    core = unwrap(model)
    encoder = encoder_of(core)
    # Below the head of a masked language model.
    encoder = getattr(encoder, "base_model", encoder)
    # Only with processes: to look at all modules takes a millisecond.
    is_sharded = torch.distributed.is_initialized() and sharded_by_fsdp(core)
    if encoder._compiled_call_impl is None and not is_sharded:
        encoder._compiled_call_impl = EncoderGraphs(encoder)
        _installed.add(encoder)


def release() -> None:
    """Undo :func:`install` for all encoders, and free the memory of their graphs."""
    for encoder in _installed:
        if isinstance(encoder._compiled_call_impl, EncoderGraphs):
            encoder._compiled_call_impl = None
    _installed.clear()


def can_record(device: torch.device) -> bool:
    """Check whether calls on this device can be recorded now."""
    return device.type == "cuda" and not torch.cuda.is_current_stream_capturing()


def record(
    forward: Callable[[], Tensor],
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    pool: tuple[int, int],
    stream: torch.cuda.Stream,
) -> Replays:
    """Record a forward, and the backward that writes the ``gradients`` of weights. Waits for the device.

    ``forward`` computes states ``[1, tokens, d]`` from tensors that stay where they are. All graphs of an encoder have
    one ``pool`` of memory, which is reused only by those that were recorded on the same ``stream``.
    """
    current = torch.cuda.current_stream()

    def backward(states: Tensor, gradient: Tensor) -> list[bool]:
        found = torch.autograd.grad(states, weights, gradient, allow_unused=True)
        pairs = [(to, part) for to, part in zip(gradients, found, strict=True) if part is not None]
        torch._foreach_copy_(*map(list, zip(*pairs, strict=True)))
        return [part is not None for part in found]

    # Weights that autocast has cast would be recorded as they are now.
    torch.clear_autocast_cache()
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        # What has not run with these sizes is compiled and chosen, which cannot be recorded.
        states = forward()
        gradient = torch.zeros_like(states)
        used = backward(states, gradient)
    current.wait_stream(stream)
    torch.clear_autocast_cache()
    first, second = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    # Threads that load data go on calling CUDA.
    options = {"pool": pool, "stream": stream, "capture_error_mode": "thread_local"}
    try:
        with torch.cuda.graph(first, **options):
            states = forward()
        with torch.cuda.graph(second, **options):
            backward(states, gradient)
    except RuntimeError:
        # Have the allocator and the random numbers of the device know that nothing is recorded.
        with contextlib.suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(stream.device_index, pool)
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            torch.zeros(1, device=stream.device)
        raise
    finally:
        torch.clear_autocast_cache()
    return Replays(first.replay, second.replay, states.detach(), gradient, used)


class EncoderGraphs:
    """In the place of an encoder's call: replays graphs where it can, and calls the encoder otherwise.

    A size is recorded when it is met for the second time. Graphs of all sizes share their memory, so that only one
    forward at a time may wait for its backward; others run without a graph. Any change of the encoder (weights that are
    frozen or replaced, adapters, modes, hooks) drops all graphs.
    """

    def __init__(self, encoder: nn.Module) -> None:
        self._encoder = encoder
        self._works = True
        self._state: tuple | None = None
        self._waiting: ref[_PendingForward] | None = None
        self._drop()

    def __call__(self, *args, **kwargs):
        if torch.compiler.is_compiling() or args:
            return self._encoder._call_impl(*args, **kwargs)
        batch = self._batch(kwargs)
        found = None if batch is None else self._recorded.get(batch.signature) or self._record(batch)
        if found is None:
            return self._encoder._call_impl(**kwargs)
        filled, replays, outputs = found
        batch.write_to(filled)
        pending = _PendingForward(filled)
        self._waiting = ref(pending)
        states = _Replay.apply(pending, replays, self._gradients, batch.tokens, *self._aliases)
        return outputs(last_hidden_state=states)

    def _batch(self, kwargs: dict[str, object]) -> _Batch | None:
        """The batch to replay, or None where the encoder has to be called."""
        mask = kwargs.get("attention_mask")
        if not (self._works and torch.is_grad_enabled() and is_packed_mask(mask) and can_record(mask.device)):
            return None
        waiting = self._waiting and self._waiting()
        # GradCache has to draw the same dropout in both of its passes, and only one of them has gradients.
        if (waiting is not None and not waiting.done) or gradcache.inside():
            return None
        batch = _Batch.of(**kwargs)
        if batch is None or batch.size.tokens > MOST_TOKENS:
            return None
        state = _state_of(self._encoder)
        if state != self._state:
            self._drop()
            self._state = state
        if state is None:
            log_once(_WITHOUT, "its modules have hooks", about=self._encoder)
            return None
        return batch

    def _record(self, batch: _Batch) -> tuple[_Batch, Replays, type] | None:
        """Record graphs for a signature that was met before. The first time everything is compiled."""
        if batch.signature not in self._met or len(self._recorded) == MOST_GRAPHS:
            self._met.add(batch.signature)
            return None
        encoder = self._encoder
        if not self._aliases:
            device = batch.borders.device
            if device.type == "cuda":
                self._memory = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)
            self._aliases = {weight: _alias_of(weight) for weight in encoder.parameters() if weight.requires_grad}
            self._gradients = [torch.empty_like(weight) for weight in self._aliases]
        if not self._aliases:
            return None
        filled, classes = batch.filled_up(), []

        def forward() -> Tensor:
            with _substituted(encoder, self._aliases):
                outputs = encoder._call_impl(**filled.inputs, **filled.others, attention_mask=filled.mask())
            if more := outputs.keys() - {"last_hidden_state", "pooler_output"}:
                raise RuntimeError(f"{type(encoder).__name__} returns {', '.join(sorted(more))}")
            classes.append(type(outputs))
            return outputs.last_hidden_state

        try:
            if not all(map(can_be_traced, checkpointed_layers(encoder))):
                raise RuntimeError("gradient checkpointing repeats the random numbers of dropout")
            replays = record(forward, list(self._aliases.values()), self._gradients, *self._memory)
        except RuntimeError as error:  # also out of memory
            self._works = False
            self._drop()
            # What ends the recording fails after whatever else has.
            while error.__context__ is not None:
                error = error.__context__
            log_once(_WITHOUT, str(error).partition("\n")[0].rstrip("."), about=encoder)
            return None
        self._recorded[batch.signature] = found = filled, replays, classes[0]
        return found

    def _drop(self) -> None:
        self._recorded: dict[tuple, tuple[_Batch, Replays, type]] = {}
        self._met: set[tuple] = set()
        self._aliases, self._gradients, self._memory = {}, [], (None, None)


def _alias_of(weight: nn.Parameter) -> nn.Parameter:
    """A parameter for the same weight, without a past.

    A loss that is still referred to keeps nodes of the weights, which belong to the stream of its backward. A recorded
    backward would have to wait for that stream.
    """
    alias = nn.Parameter(weight.detach())
    alias.__dict__.update(weight.__dict__)
    return alias


@contextlib.contextmanager
def _substituted(model: nn.Module, aliases: dict[nn.Parameter, nn.Parameter]) -> Iterator[None]:
    replaced = [
        (module._parameters, name, weight)
        for module in model.modules()
        for name, weight in module._parameters.items()
        if weight in aliases
    ]
    try:
        for parameters, name, weight in replaced:
            parameters[name] = aliases[weight]
        yield
    finally:
        for parameters, name, weight in replaced:
            parameters[name] = weight


class _PendingForward:
    """A forward, until its backward. Nobody will make one once it is collected."""

    def __init__(self, filled: _Batch) -> None:
        # The backward reads these too, perhaps after the graphs were dropped.
        self.filled = filled
        self.done = False


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, pending: _PendingForward, replays: Replays, gradients: list[Tensor], tokens: int, *weights: Tensor
    ) -> Tensor:
        ctx.pending, ctx.replays, ctx.gradients, ctx.tokens = pending, replays, gradients, tokens
        replays.forward()
        return replays.states[:, :tokens].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.pending.done:
            raise RuntimeError(
                "A batch that ran as a CUDA graph has one backward, which overwrites what it needs. Train without "
                "compile=True to call backward() twice."
            )
        ctx.pending.done = True
        ctx.replays.gradient[:, : ctx.tokens].copy_(grad)
        ctx.replays.gradient[:, ctx.tokens :].zero_()
        ctx.replays.backward()
        # Copies: a gradient that is accumulated must not be overwritten by the next backward.
        used = [gradient for gradient, is_used in zip(ctx.gradients, ctx.replays.used, strict=True) if is_used]
        copies = [torch.empty_like(gradient) for gradient in used]
        torch._foreach_copy_(copies, used)
        each = iter(copies)
        return None, None, None, None, *(next(each) if is_used else None for is_used in ctx.replays.used)


class _Batch(NamedTuple):
    # Ids and positions [1, tokens] by name, and arguments that are no tensors.
    inputs: dict[str, Tensor]
    others: dict[str, object]
    # cu_seqlens and, where it differs, that of the keys: [1 or 2, N + 1].
    borders: Tensor
    # As in packed_mask; 0 without keys.
    longest_apart: int
    # Of the graph, and what else all batches have in common that it runs.
    size: Size
    signature: tuple

    @property
    def tokens(self) -> int:
        return next(iter(self.inputs.values())).shape[1]

    @classmethod
    def of(cls, attention_mask: Tensor, **arguments: object) -> _Batch | None:
        """The batch of a call, or None if that has other arguments."""
        inputs = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
        others = {name: value for name, value in arguments.items() if name not in inputs}
        if not inputs or any(value not in (None, False, True) for value in others.values()):
            return None
        if others.get("output_hidden_states") or others.get("output_attentions"):
            return None
        rows = next(iter(inputs.values()))
        if any(value.shape != rows.shape or value.is_floating_point() for value in inputs.values()):
            return None
        if rows.dim() != 2 or len(rows) != 1:
            return None
        sides, apart, longest, ends = attention_mask.shape
        apart = apart if sides > 1 else 0
        size = Size.smallest_for(rows.shape[1], ends - 1, longest)
        dtypes = sorted((name, str(value.dtype)) for name, value in inputs.items())
        device = rows.device.type
        precision = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
        signature = size, sides, apart, precision, rows.device, *dtypes, *sorted(others.items())
        return cls(inputs, others, attention_mask[:, 0, 0], apart, size, signature)

    def filled_up(self) -> _Batch:
        """A batch of the whole size."""
        rows, texts, _ = self.size
        inputs = {name: value.new_zeros((1, rows)) for name, value in self.inputs.items()}
        # A view of one dimension as in calls without graphs: layers are compiled for what a mask is a view of.
        borders = self.borders.new_zeros(len(self.borders) * (texts + 1)).view(-1, texts + 1)
        filled = self._replace(inputs=inputs, borders=borders)
        self.write_to(filled)
        return filled

    def write_to(self, filled: _Batch) -> None:
        """Write this batch into a larger one. Behind it, ids of earlier batches stay: they are valid ones."""
        for name, value in self.inputs.items():
            filled.inputs[name][:, : self.tokens].copy_(value)
        filled.borders.copy_(self.size.borders(self.borders, self.tokens))

    def mask(self) -> Tensor:
        rows, keys = self.borders[0], self.borders[-1]
        if self.longest_apart:
            return packed_mask(rows, self.size.longest, keys, self.longest_apart)
        return packed_mask(rows, self.size.longest)


def _state_of(encoder: nn.Module) -> tuple | None:
    """State that graphs of an encoder depend on beside a batch; None if something is called that graphs would leave out."""
    if has_global_hooks():
        return None
    state = []
    for module in encoder.modules():
        if has_hooks(module) and not _only_requires_gradients(module):
            return None
        state += id(module), module.training, vars(module).get("gradient_checkpointing"), vars(module).get("p")
        for weight in module._parameters.values():
            if weight is not None:
                state += weight.data_ptr(), weight.dtype, weight.requires_grad
    return tuple(state)


def _only_requires_gradients(module: nn.Module) -> bool:
    """Check whether its only hook is what transformers adds for gradient checkpointing, which runs nothing on a GPU."""
    if module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        return False
    hooks = module._forward_hooks.values()
    return all(
        getattr(hook, "__qualname__", "").endswith("make_inputs_require_grads") and defined_in(hook, ("transformers",))
        for hook in hooks
    )
