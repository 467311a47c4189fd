"""The hosts whose losses are run with and without the flag: a tiny model of each, steps of its losses, and what they do.

A host is an adapter in a module of its own, which imports it. PyLate and MultiVectorEncoder cannot be installed together.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

import pytest
from torch import Tensor, nn

import pylate_fastmaxsim
from pylate_fastmaxsim.integrations.compilation.layers import encoder_layers
from pylate_fastmaxsim.integrations.encoding import modes as encoding_modes
from tests.support.compared import assert_equal, run, value_of
from tests.support.models import looking


class Step(NamedTuple):
    """A loss of a model on a batch. ``tolerance``: of loss and gradients, in float64."""

    loss: nn.Module
    batch: list[dict]
    labels: Tensor | None = None
    tolerance: float = 1e-10

    def run(self, bf16: bool = False) -> tuple[Tensor, dict[str, Tensor]]:
        return run(self.loss, self.batch, self.labels, bf16)

    def value(self) -> Tensor:
        return value_of(self.loss, self.batch, self.labels)

    def assert_equal(self, ours: tuple, stock: tuple) -> None:
        assert_equal(ours, stock, self.tolerance)


@dataclass(eq=False)
class Host:
    # A model in training, in float64, of the folder of a tiny encoder.
    load: Callable[..., nn.Module]
    # Steps by name. All hosts have "contrastive", "cached" (GradCache) and "distillation".
    losses: dict[str, Callable[[nn.Module], Step]]
    # The step of a loss on a batch of this rank: (model, wrapped model, name, options).
    step_of_rank: Callable[..., Step]
    # What calls the encoder of documents.
    transformer: Callable[[nn.Module], nn.Module]
    # By which the choice of a mode is kept.
    decided_by: Callable[[nn.Module], object]
    # Families of encoders, and the mode of those that are not encoded packed where that is possible.
    families: dict[str, str | None]
    # Operators that score in the fast path, or the stock work that is not done there: what is appended to a list.
    watch: Callable[[nn.Module, pytest.MonkeyPatch], list]
    watches_stock: bool = False
    # The attribute of a loss that scores.
    metric: str | None = None
    # Its trainer, and its arguments.
    trainer: tuple[type, type] | None = None
    # Those of enable().
    options: dict[str, Any] = field(default_factory=dict)
    # Of the encoder.
    changes: dict[str, Any] = field(default_factory=dict)

    def model(self, encoder: Callable[..., str], family: str = "bert", **changes: object) -> nn.Module:
        return self.load(encoder(family, **self.changes, **changes))

    def enable(self, **options: object) -> None:
        pylate_fastmaxsim.enable(**self.options, **options)

    def modes(self, model: nn.Module) -> set[str]:
        return set(encoding_modes.chosen.get(self.decided_by(model), {}).values())

    def assert_as_stock(self, model: nn.Module, step: Step, monkeypatch: pytest.MonkeyPatch, **options: object) -> None:
        """Loss and gradients of a step are stock's, by the fast path. The package stays on."""
        seen = self.watch(model, monkeypatch)
        stock = step.run()
        assert bool(seen) == self.watches_stock
        self.enable(**options)
        for _ in range(2):  # checks on the first batch run parts of stock
            seen.clear()
            step.assert_equal(step.run(), stock)
        assert bool(seen) != self.watches_stock, "the fast path was not taken"


PACKAGES = {"PyLate": "pylate_steps", "MultiVectorEncoder": "multi_vector", "SparseEncoder": "splade_steps"}
COMMON = "contrastive", "cached", "distillation"
OF_SENTENCE_TRANSFORMERS = "MultiVectorEncoder", "SparseEncoder"


@cache
def host_of(name: str) -> Host | str:
    """A host, or why there is none."""
    try:
        return import_module(f"tests.support.{PACKAGES[name]}").HOST
    except (ImportError, pytest.skip.Exception) as reason:
        return str(reason)


def each_host(names: Iterable[str] = PACKAGES, *values: object) -> list:
    """Parameters: hosts, each with these values. One that is not installed is skipped, with the reason."""
    hosts = {name: host_of(name) for name in names}
    return [
        pytest.param(
            host,
            *values,
            id="-".join(map(str, (name, *values))),
            marks=pytest.mark.skipif(isinstance(host, str), reason=str(host)),
        )
        for name, host in hosts.items()
    ]


def each_loss() -> list:
    """Parameters: hosts, their losses, and modes. Those that all hosts have are run in both modes, the others packed."""
    return [
        param
        for name in PACKAGES
        for loss in getattr(host_of(name), "losses", ["contrastive"])
        for mode in (("packed", "grouped") if loss in COMMON else ("packed",))
        for param in each_host([name], loss, mode)
    ]


def operators(*places: tuple[ModuleType, str]) -> Callable[[nn.Module, pytest.MonkeyPatch], list]:
    def watch(_model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> list:
        made: list = []
        for module, name in places:

            def counted(*args, operator=getattr(module, name), **kwargs):  # noqa: B008
                made.append((args, kwargs))
                return operator(*args, **kwargs)

            monkeypatch.setattr(module, name, counted)
        return made

    return watch


def encoder_calls(model: nn.Module) -> list[Tensor]:
    made: list[Tensor] = []

    def note(_module, _args, output):
        made.append((output[0] if isinstance(output, tuple) else output).detach())

    encoder_layers(model)[-1].register_forward_hook(looking(note))
    return made
