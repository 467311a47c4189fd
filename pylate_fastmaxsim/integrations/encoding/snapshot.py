"""Restore a model after calls that only look at it: buffers, hooks, attributes and modules that transformers keeps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from pylate_fastmaxsim.integrations.encoding.mask_changes import writes_to
from pylate_fastmaxsim.integrations.patching.provenance import LIBRARIES, defined_in

# Attributes that PyTorch itself keeps in a module.
_OF_PYTORCH = frozenset(vars(nn.Module()))


class Snapshot:
    """Buffers and hooks of a model at one time, and attributes and submodules of its modules of transformers."""

    def __init__(self, core: nn.Module) -> None:
        self.modules = [(module, dict(module._buffers)) for module in core.modules()]
        self.values = {buffer: (buffer.detach().clone(), writes_to(buffer)) for buffer in core.buffers()}
        # Rotary embeddings of transformers keep the longest length there, and BigBird puts another attention in the
        # place of its own when texts are short. FSDP prepares its own modules in their first call, for good.
        self.of_transformers = [
            (module, _attributes(module), dict(module._modules))
            for module in core.modules()
            if _of_transformers(module)
        ]
        # To return outputs of layers, transformers adds hooks in the first call and keeps in an attribute that it has.
        hooks = [each for part in core.modules() for each in (part._forward_hooks, part._forward_pre_hooks)]
        self.hooks = [(of_module, set(of_module)) for of_module in hooks]

    def state_changed(self) -> bool:
        """Whether a buffer was changed."""
        return any(
            module._buffers.keys() != buffers.keys()
            or any(self._holds_else(module._buffers[name], buffer) for name, buffer in buffers.items())
            for module, buffers in self.modules
        )

    def modules_replaced(self) -> bool:
        """Whether a module of transformers has other submodules now."""
        return any(module._modules != submodules for module, _, submodules in self.of_transformers)

    def _holds_else(self, now: Tensor | None, buffer: Tensor | None) -> bool:
        if now is None or buffer is None:
            return now is not buffer
        before, _ = self.values[buffer]
        return now.shape != before.shape or not torch.equal(now, before)

    def restore(self) -> None:
        """Restore all of it."""
        for module, buffers in self.modules:
            module._buffers.clear()
            module._buffers.update(buffers)
        for tensor, (value, writes) in self.values.items():
            # Writing to an unchanged buffer would break a backward that is still to come. Batch norm writes without
            # raising the version.
            if writes_to(tensor) != writes or not torch.equal(tensor, value):
                tensor.copy_(value)
        for module, attributes, submodules in self.of_transformers:
            for name in _attributes(module):
                del vars(module)[name]
            vars(module).update(attributes)
            module._modules.clear()
            module._modules.update(submodules)
        for hooks, before in self.hooks:
            for key in hooks.keys() - before:
                # Training libraries prepare a model in its first call, for good.
                if not defined_in(hooks[key], LIBRARIES):
                    del hooks[key]


@contextmanager
def untouched(core: nn.Module) -> Iterator[Snapshot]:
    """Context that restores a model at its end.

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
    before = Snapshot(core)
    try:
        yield before
    finally:
        with torch.no_grad():
            before.restore()


def _attributes(module: nn.Module) -> dict[str, object]:
    return {name: value for name, value in vars(module).items() if name not in _OF_PYTORCH}


def _of_transformers(module: nn.Module) -> bool:
    return type(module).__module__.partition(".")[0] in ("transformers", "transformers_modules")
