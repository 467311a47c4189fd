from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

from pylate_fastmaxsim.integrations.compilation import modernbert

OPERATORS = "geglu_linear", "norm_with_residual", "rotary_self_attention"


@pytest.fixture(autouse=True)
def backend(request, monkeypatch):
    """Layers are compiled by this one: by default they run as they were traced."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=getattr(request, "param", "eager")))
    torch._dynamo.reset()


@pytest.fixture
def used(monkeypatch) -> list[object]:
    """The operators of ModernBERT's layers that are traced, and what else a test has noted."""
    noted: list[object] = []

    # Run while a layer is traced, and not looked at again: with a guard on a list each call would be traced.
    @torch.compiler.assume_constant_result
    def note(what: object) -> None:
        noted.append(what)

    def noting(name: str) -> Callable:
        operator = getattr(modernbert, name)

        def call(*args, **kwargs):
            note(name)
            return operator(*args, **kwargs)

        return call

    for name in OPERATORS:
        monkeypatch.setattr(modernbert, name, noting(name))
    return noted
