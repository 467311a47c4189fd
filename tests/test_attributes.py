"""What a module keeps in plain attributes is seen to change, and put back in place."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque

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


@pytest.mark.parametrize("change", [_append, _count, _fill, _write, _write_tensor, _forget, _add, _push, _replace])
def test_a_change_inside_of_a_container_is_seen_and_taken_back(change):
    module = nn.Identity()
    module.kept = kept = {
        "seen": [],
        "tokens": Counter(a=2, b=1),
        "by name": defaultdict(list, {"old": [1]}),
        "arrays": (array := [np.arange(3)]),
        "ordered": OrderedDict(mean=torch.ones(2), other=torch.zeros(1)),
        "ids": {1, 2},
        "last": deque([0.5, 1.5], maxlen=2),
        "number": 3,
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


def test_an_equal_value_is_no_change():
    module = nn.Identity()
    module.kept = {"name": "a b", "number": 1000.5, "list": [1000]}
    before = Attributes(module)
    module.kept["name"], module.kept["number"] = "".join(["a", " b"]), float("1000.5")
    module.kept["list"][0] = int("1000")
    assert not before.changed()
