"""A function is redirected in place: all that held it follows, and nobody who inspects it sees a difference."""

import functools
import inspect
import pydoc
from types import FunctionType

import pytest

from pylate_fastmaxsim.integrations.patching.patches import Redirection, can_redirect, detached


def make():
    def score(a, /, b, c=3, *rest, d, e=5, **more):
        """Docstring."""
        return "stock", a, b, c, rest, d, e, more

    return score


def fast(*args, **kwargs):
    return "fast", args, kwargs


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
    assert redirection.undo()
    assert score(1, 2, d=4) == ("stock", 1, 2, 3, (), 4, 5, {})
    # Again with the same code, which torch.compile may have compiled.
    Redirection(score, fast)
    assert score.__code__ is ours and score(1, 2, d=4)[0] == "fast"


def test_it_looks_as_before():
    score = make()

    def look():
        text = pydoc.plain(pydoc.render_doc(score))
        return inspect.signature(score), inspect.getfullargspec(score), inspect.getsource(score), text, score.__name__

    def state():
        return score.__code__, score.__defaults__, score.__kwdefaults__, dict(vars(score)), score.__annotations__

    before, state_before = look(), state()
    redirection = Redirection(score, fast)
    assert look() == before
    assert score.__wrapped__(1, 2, d=4)[0] == "stock" and state()[0] is not state_before[0]
    redirection.undo()
    assert look() == before
    assert state() == state_before and state()[0] is state_before[0]


def test_a_copy_stays_what_the_function_was():
    score = make()
    stock = detached(score)
    assert inspect.signature(stock) == inspect.signature(score)
    Redirection(score, stock)
    assert score(1, 2, d=4) == stock(1, 2, d=4) == ("stock", 1, 2, 3, (), 4, 5, {})


def test_what_is_not_a_plain_function_is_not_redirected():
    free = make()

    async def coroutine():
        pass

    others = [len, make, functools.lru_cache(make()), functools.wraps(make())(lambda: free), lambda: free, coroutine]
    others += [functools.wraps(make)(make()), (lambda: (yield)), functools.partial(make), int]
    assert [can_redirect(other) for other in others] == [other is make for other in others]
    assert all(detached(other) is other for other in others if other is not make)


def test_a_call_that_began_before_the_undo_arrives():
    score = make()
    redirection = Redirection(score, fast)
    entered = FunctionType(score.__code__, score.__globals__)
    redirection.undo()
    assert entered(1, 2, 3, d=4, e=5) == ("fast", (1, 2, 3), {"d": 4, "e": 5})
