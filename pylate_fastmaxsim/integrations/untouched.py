"""Calls of a model that leave it as it was: the statistics it keeps, what it remembers of the lengths it has seen."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

# What a module of transformers counts and remembers with, beside tensors: rotary positions, which attention it has.
_PLAIN = (bool, int, float, str, type(None))


class Before:
    """Buffers, modules and plain attributes of a model at one time."""

    def __init__(self, core: nn.Module) -> None:
        self.modules = [(module, dict(module._buffers), dict(module._modules)) for module in core.modules()]
        self.values = {buffer: buffer.clone() for buffer in core.buffers()}
        # Not of FSDP's modules, which prepare themselves in their first call.
        self.plain = [(module, _plain(module)) for module in core.modules() if _of_transformers(module)]

    def buffers_changed(self) -> bool:
        """Whether one holds something else than before."""
        return any(
            module._buffers.keys() != buffers.keys()
            or any(self._holds_else(module._buffers[name], buffer) for name, buffer in buffers.items())
            for module, buffers, _ in self.modules
        )

    def _holds_else(self, now: Tensor | None, buffer: Tensor | None) -> bool:
        if now is None or buffer is None:
            return now is not buffer
        before = self.values[buffer]
        return now.shape != before.shape or not torch.equal(now, before)

    def restore(self) -> None:
        for module, buffers, modules in self.modules:
            module._buffers.clear()
            module._buffers.update(buffers)
            module._modules.clear()
            module._modules.update(modules)
        for buffer, value in self.values.items():
            buffer.copy_(value)
        for module, attributes in self.plain:
            for name in _plain(module).keys() - attributes.keys():
                delattr(module, name)
            vars(module).update(attributes)


@contextmanager
def untouched(core: nn.Module) -> Iterator[Before]:
    """Within this, calls may change buffers and plain attributes of a model; afterwards it has those from before.

    Examples
    --------
    >>> norm = nn.BatchNorm1d(2)
    >>> with untouched(norm) as before:
    ...     _ = norm(torch.ones(3, 2))
    ...     print(before.buffers_changed())
    True
    >>> norm.num_batches_tracked
    tensor(0)
    """
    before = Before(core)
    try:
        yield before
    finally:
        with torch.no_grad():
            before.restore()


def _of_transformers(module: nn.Module) -> bool:
    return type(module).__module__.partition(".")[0] in ("transformers", "transformers_modules")


def _plain(module: nn.Module) -> dict[str, object]:
    return {name: value for name, value in vars(module).items() if isinstance(value, _PLAIN)}
