"""Patches are put back as they were found, but for what somebody else has replaced since."""

import functools
import sys
from types import ModuleType

import pytest

from pylate_fastmaxsim.integrations.patching.patches import Patch, PatchSet


def fast(*args, **kwargs):
    return "fast", args, kwargs


@pytest.fixture
def hosts(monkeypatch):
    """The function of the first has a free variable, so that its attribute is replaced; that of the second is redirected."""
    result = "stock"
    made = []
    for name, score in (("bound_host", lambda: result), ("plain_host", lambda: "stock")):
        module = ModuleType(name)
        module.score = score
        monkeypatch.setitem(sys.modules, name, module)
        made.append(module)
    return made


def says(what: str):
    return lambda: what


def applied(owner, replacement, name: str = "score") -> PatchSet:
    patches = PatchSet()
    patches.apply([Patch(owner, name, replacement)])
    return patches


def test_nothing_is_applied_where_one_name_is_missing(hosts):
    host = hosts[0]
    original, patches = host.score, PatchSet()
    with pytest.raises(AttributeError, match="bound_host.absent"):
        patches.apply([Patch(host, "score", fast), Patch(host, "absent", fast)])
    assert host.score is original and patches.targets == []


def test_somebody_elses_later_patch_is_left_alone(hosts, caplog):
    theirs = says("theirs")
    for owner in hosts:
        found = owner.score
        patches = applied(owner, fast)
        if owner is hosts[0]:
            owner.score = theirs
        else:
            owner.score.__code__ = (lambda: "theirs").__code__
        patches.undo()
        assert owner.score() == "theirs" and f"{owner.__name__}.score" in caplog.text
    assert owner.score is found


def test_somebody_elses_later_wrapper_of_a_plain_function_goes_on(hosts, caplog):
    host = hosts[1]
    found = host.score
    patches = applied(host, says("fast"))
    host.score = lambda: f"theirs, {found()}"
    assert host.score() == "theirs, fast"
    patches.undo()
    assert host.score() == "theirs, stock" and not caplog.messages


def test_a_plain_function_stays_and_all_that_hold_it_follow(hosts):
    host = hosts[1]
    score = host.score

    class Holder:
        method = staticmethod(score)

    def default(function=score):
        return function()

    holders = [score, host.score, Holder.method, default, functools.partial(score), lambda: score()]
    patches = PatchSet()
    for _ in range(2):
        for _ in range(2):
            patches.apply([Patch(host, "score", says("fast"))])
            assert patches.targets == ["plain_host.score"] and host.score is score
        assert [holder() for holder in holders] == ["fast"] * len(holders)
        for _ in range(2):
            patches.undo()
            assert patches.targets == []
        assert [holder() for holder in holders] == ["stock"] * len(holders)
        assert not vars(score)
