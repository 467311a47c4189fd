"""What a module keeps in plain attributes is seen to change, and put back in place."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict, defaultdict, deque
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from pylate_fastmaxsim.integrations.attributes import Attributes


def _append(kept):
    kept["seen"].append(1)


def _count(kept):
    kept["tokens"]["a"] += 1


def _fill(kept):
    kept["by name"]["new"].append(1)


def _write(kept):
    kept["arrays"][0][1] = 5


def _write_tensor(kept):
    kept["ordered"]["mean"].add_(1)


def _forget(kept):
    del kept["ordered"]["mean"]


def _add(kept):
    kept["ids"].add(7)


def _push(kept):
    kept["last"].append(2.5)  # and out goes the first


def _replace(kept):
    kept["number"] = 4


def _measure(kept):
    kept["meter"].values.append(2.5)


def _name(kept):
    kept["meter"].name = "loss"


def _advance(kept):
    kept["space"].step += 1


class _Own(nn.Identity):
    pass


class _Meter:
    def __init__(self):
        self.values = [0.5]

    def __repr__(self):
        return f"_Meter({vars(self)})"


@pytest.mark.parametrize(
    "change",
    [_append, _count, _fill, _write, _write_tensor, _forget, _add, _push, _replace, _measure, _name, _advance],
)
def test_a_change_inside_of_a_container_is_seen_and_taken_back(change):
    module = _Own()
    module.kept = kept = {
        "seen": [],
        "tokens": Counter(a=2, b=1),
        "by name": defaultdict(list, {"old": [1]}),
        "arrays": (array := [np.arange(3)]),
        "ordered": OrderedDict(mean=torch.ones(2), other=torch.zeros(1)),
        "ids": {1, 2},
        "last": deque([0.5, 1.5], maxlen=2),
        "number": 3,
        "meter": _Meter(),
        "space": SimpleNamespace(step=1),
    }
    kept["itself"] = kept
    parts, shown = dict(kept), repr(kept)
    before = Attributes(module)
    assert not before.changed()
    change(kept)
    assert before.changed()
    before.restore()
    assert not before.changed() and repr(kept) == shown
    assert module.kept is kept and all(kept[key] is part for key, part in parts.items())
    assert kept["arrays"] is array and list(kept) == list(parts)


@pytest.mark.parametrize(
    "generator, draw",
    [
        (torch.Generator(), lambda generator: torch.rand(1, generator=generator).item()),
        (random.Random(0), random.Random.random),
        (np.random.RandomState(0), np.random.RandomState.rand),
        (np.random.default_rng(0), np.random.Generator.random),
    ],
)
def test_random_numbers_that_were_drawn_are_no_change_and_come_again(generator, draw):
    module = nn.Identity()
    module.generator = generator
    before = Attributes(module)
    drawn = [draw(generator) for _ in range(3)]
    assert not before.changed()
    before.restore()
    assert [draw(generator) for _ in range(3)] == drawn and module.generator is generator


def test_an_equal_value_is_no_change():
    module = nn.Identity()
    module.kept = {"name": "a b", "number": 1000.5, "list": [1000]}
    before = Attributes(module)
    module.kept["name"], module.kept["number"] = "".join(["a", " b"]), float("1000.5")
    module.kept["list"][0] = int("1000")
    assert not before.changed()
