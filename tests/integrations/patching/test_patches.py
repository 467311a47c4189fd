import sys
from functools import partial
from types import ModuleType

import pytest

from pylate_fastmaxsim.integrations.patching.patches import Patch, PatchSet


def module(monkeypatch, name, **names):
    made = ModuleType(name)
    vars(made).update(names)
    monkeypatch.setitem(sys.modules, name, made)
    return made


@pytest.fixture
def fast():
    return lambda: "fast"


@pytest.fixture
def host(monkeypatch):
    """Its function has a free variable, so that the attribute is replaced."""
    result = "stock"
    return module(monkeypatch, "host", score=lambda: result)


@pytest.fixture
def plain_host(monkeypatch):
    return module(monkeypatch, "plain_host", score=lambda: "stock")


def test_nothing_is_applied_where_one_name_is_missing(host, fast):
    original = host.score
    patches = PatchSet()
    with pytest.raises(AttributeError, match="host.absent"):
        patches.apply([Patch(host, "score", fast), Patch(host, "absent", fast)])
    assert host.score is original
    assert patches.targets == []


def test_class_attributes_are_restored_as_they_were_found(fast):
    class Base:
        inherited = property(lambda self: "base")

    class Child(Base):
        @staticmethod
        def static():
            return "stock"

    before = dict(vars(Child))
    patches = PatchSet()
    patches.apply(
        [Patch(Child, "inherited", property(lambda self: "patched")), Patch(Child, "static", staticmethod(fast))]
    )
    assert (Child().inherited, Child.static(), Base().inherited) == ("patched", "fast", "base")
    patches.undo()
    assert dict(vars(Child)) == before
    assert Child().inherited == "base"


def test_somebody_elses_later_patch_is_left_alone(host, plain_host, fast, caplog):
    found, theirs = plain_host.score, lambda: "theirs"
    for owner in (host, plain_host):
        patches = PatchSet()
        patches.apply([Patch(owner, "score", fast)])
        if owner is host:
            host.score = theirs
        else:
            plain_host.score.__code__ = theirs.__code__
        patches.undo()
        assert owner.score() == "theirs"
        assert f"{owner.__name__}.score" in caplog.text
    assert plain_host.score is found


def test_somebody_elses_later_wrapper_of_a_plain_function_goes_on(plain_host, fast, caplog):
    found = plain_host.score
    patches = PatchSet()
    patches.apply([Patch(plain_host, "score", fast)])
    plain_host.score = lambda: f"theirs, {found()}"
    assert plain_host.score() == "theirs, fast"
    patches.undo()
    assert plain_host.score() == "theirs, stock"
    assert not caplog.messages


def test_a_plain_function_stays_and_all_that_hold_it_follow(plain_host, fast):
    score = plain_host.score

    class Holder:
        method = staticmethod(score)

    def default(function=score):
        return function()

    holders = [score, plain_host.score, Holder.method, default, partial(score), lambda: score(), {"key": score}["key"]]
    patches = PatchSet()
    for _ in range(2):
        patches.apply([Patch(plain_host, "score", fast)])
        patches.apply([Patch(plain_host, "score", fast)])
        assert patches.targets == ["plain_host.score"]
        assert plain_host.score is score
        assert [holder() for holder in holders] == ["fast"] * len(holders)
        patches.undo()
        patches.undo()
        assert patches.targets == []
        assert [holder() for holder in holders] == ["stock"] * len(holders)
        assert not vars(score)
