"""Calls of a model that leave it as it was: the statistics it keeps, what it remembers of the lengths it has seen."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from pylate_fastmaxsim.integrations.attributes import Attributes
from pylate_fastmaxsim.integrations.changed_masks import writes_to
from pylate_fastmaxsim.integrations.wrappers import LIBRARIES, written_in


class Before:
    """Buffers, modules and attributes of a model at one time; of modules of somebody's own also parameters."""

    def __init__(self, core: nn.Module, own: Iterable[nn.Module]) -> None:
        own = list(own)
        # Not what FSDP 2 divided, of which every rank would have to compare its part at the same time.
        self.weights = [weight for part in own for weight in part._parameters.values() if type(weight) is nn.Parameter]
        self.modules = [(module, dict(module._buffers), dict(module._modules)) for module in core.modules()]
        tensors = (*core.buffers(), *self.weights)
        self.values = {tensor: (tensor.detach().clone(), writes_to(tensor)) for tensor in tensors}
        self.own = [Attributes(module) for module in own]
        # None where a module will make one in its first call.
        self.parameters = [(part._parameters, dict(part._parameters)) for part in own]
        self.trained = [(weight, weight.requires_grad) for weight in core.parameters()]
        # Where transformers remembers the longest text. Not of FSDP's modules, which prepare themselves in their first
        # call.
        self.of_transformers = [Attributes(module) for module in core.modules() if _of_transformers(module)]
        # Where transformers is to return outputs of layers, it puts hooks there in the first call, and remembers that it
        # has; modules of somebody's own may too.
        hooks = [each for part in core.modules() for each in (part._forward_hooks, part._forward_pre_hooks)]
        self.hooks = [(of_module, set(of_module)) for of_module in hooks]

    def state_changed(self) -> bool:
        """Whether a buffer holds something else than before, or a module of somebody's own remembers something else."""
        return (
            any(attributes.changed() for attributes in self.own)
            or any(self._holds_else(weight, weight) for weight in self.weights)
            or any(
                module._buffers.keys() != buffers.keys()
                or any(self._holds_else(module._buffers[name], buffer) for name, buffer in buffers.items())
                for module, buffers, _ in self.modules
            )
        )

    def _holds_else(self, now: Tensor | None, buffer: Tensor | None) -> bool:
        if now is None or buffer is None:
            return now is not buffer
        before, _ = self.values[buffer]
        return now.shape != before.shape or not torch.equal(now, before)

    def restore(self) -> None:
        """Put all of it back."""
        for module, buffers, modules in self.modules:
            module._buffers.clear()
            module._buffers.update(buffers)
            module._modules.clear()
            module._modules.update(modules)
        for tensor, (value, writes) in self.values.items():
            # A backward that is still to come may need it as it is, and sees that it was written to. Batch norm writes its
            # statistics without being seen.
            if writes_to(tensor) != writes or not torch.equal(tensor, value):
                tensor.copy_(value)
        for attributes in (*self.of_transformers, *self.own):
            attributes.restore()
        for parameters, before in self.parameters:
            for name in list(parameters):
                if name not in before:
                    del parameters[name]
                elif before[name] is None:
                    parameters[name] = None
        for weight, is_trained in self.trained:
            if weight.requires_grad != is_trained:
                weight.requires_grad_(is_trained)
        for hooks, before in self.hooks:
            for key in hooks.keys() - before:
                # Libraries of training prepare a model in its first call for good.
                if not written_in(hooks[key], LIBRARIES):
                    del hooks[key]


@contextmanager
def untouched(core: nn.Module, own: Iterable[nn.Module] = ()) -> Iterator[Before]:
    """Within this, calls may change buffers and attributes of a model; afterwards it has those from before.

    Of the modules ``own``, whose code is not known, also parameters and what lists and dictionaries hold.

    Examples
    --------
    >>> norm = nn.BatchNorm1d(2)
    >>> with untouched(norm) as before:
    ...     _ = norm(torch.ones(3, 2))
    ...     print(before.state_changed())
    True
    >>> norm.num_batches_tracked
    tensor(0)
    """
    before = Before(core, own)
    try:
        yield before
    finally:
        with torch.no_grad():
            before.restore()


def _of_transformers(module: nn.Module) -> bool:
    return type(module).__module__.partition(".")[0] in ("transformers", "transformers_modules")
