"""Patches are put back as they were found, and a function that is redirected looks as before to who inspects it."""

import functools
import inspect
import pydoc
import sys
from types import FunctionType, ModuleType

import pytest

from pylate_fastmaxsim.integrations.patching.patches import Patch, PatchSet, Redirection, can_redirect, detached


def make():
    def score(a, /, b, c=3, *rest, d, e=5, **more):
        """Docstring."""
        return "stock", a, b, c, rest, d, e, more

    return score


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


def test_class_attributes_are_restored_as_they_were_found():
    class Base:
        inherited = property(lambda self: "base")

    class Child(Base):
        @staticmethod
        def static():
            return "stock"

    before, patches = dict(vars(Child)), PatchSet()
    patches.apply(
        [
            Patch(Child, "inherited", property(lambda self: "patched")),
            Patch(Child, "static", staticmethod(says("fast"))),
        ]
    )
    assert (Child().inherited, Child.static(), Base().inherited) == ("patched", "fast", "base")
    patches.undo()
    assert dict(vars(Child)) == before and Child().inherited == "base"


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


def test_arguments_and_defaults_arrive():
    score = make()
    redirection = Redirection(score, fast)
    ours = score.__code__
    everything = {"d": 4, "e": 5}
    assert score(1, 2, d=4) == ("fast", (1, 2, 3), everything)
    assert score(1, b=2, d=4) == ("fast", (1, 2, 3), everything)
    assert score(1, 2, 7, 8, 9, d=4, f=6) == ("fast", (1, 2, 7, 8, 9), everything | {"f": 6})
    with pytest.raises(TypeError, match=r"score\(\) missing 1 required keyword-only argument: 'd'"):
        score(1, 2)
    # A call that began before the undo arrives.
    entered = FunctionType(ours, score.__globals__)
    assert redirection.undo()
    assert entered(1, 2, 3, d=4, e=5) == ("fast", (1, 2, 3), everything)
    assert score(1, 2, d=4) == ("stock", 1, 2, 3, (), 4, 5, {})
    # Again with the same code, which torch.compile may have compiled.
    Redirection(score, fast)
    assert score.__code__ is ours and score(1, 2, d=4)[0] == "fast"


def test_it_looks_as_before_and_a_copy_stays_what_it_was():
    score = make()
    stock = detached(score)

    def look():
        text = pydoc.plain(pydoc.render_doc(score))
        return inspect.signature(score), inspect.getfullargspec(score), inspect.getsource(score), text, score.__name__

    def state():
        return score.__code__, score.__defaults__, score.__kwdefaults__, dict(vars(score)), score.__annotations__

    before, state_before = look(), state()
    redirection = Redirection(score, stock)
    assert look() == before and inspect.signature(stock) == inspect.signature(score)
    assert score(1, 2, d=4) == stock(1, 2, d=4) == score.__wrapped__(1, 2, d=4) == ("stock", 1, 2, 3, (), 4, 5, {})
    assert state()[0] is not state_before[0]
    redirection.undo()
    assert look() == before
    assert state() == state_before and state()[0] is state_before[0]


def test_what_is_not_a_plain_function_is_not_redirected():
    free = make()

    async def coroutine():
        pass

    others = [len, make, functools.lru_cache(make()), functools.wraps(make())(lambda: free), lambda: free, coroutine]
    others += [functools.wraps(make)(make()), (lambda: (yield)), functools.partial(make), int]
    assert [can_redirect(other) for other in others] == [other is make for other in others]
    assert all(detached(other) is other for other in others if other is not make)
