"""Stand-ins for functions of a host library, which leave to it what the operators do not take."""

import functools
import inspect
import os
from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

from pylate_fastmaxsim.integrations.log import log_once
from pylate_fastmaxsim.integrations.options import current_options
from pylate_fastmaxsim.integrations.patching.known_sources import not_known, unknown_part
from pylate_fastmaxsim.integrations.patching.patches import Patch, detached
from pylate_fastmaxsim.pooling import Max

_DTYPES = {torch.float16, torch.bfloat16, torch.float32, torch.float64}


class FallbackToHost(Exception):
    """The host's own function has to compute this, or has to raise for it: the reason."""


def replaces(stock: Callable, host: str, pooled: bool = True) -> Callable[[Callable], Callable]:
    """Decorator: stand in for ``stock`` of ``host``, and call it where the fast function leaves the input to it.

    ``pooled``: the fast function pools as ``enable(pooling=...)`` says. Stock takes the maximum, so that with another
    pooling it is not called, and what the fast function leaves to it is a ValueError.

    The fast function is given the options in force and then the arguments of stock. A call may outlive ``disable()``,
    in another thread or by a reference to a method that was taken before; one that begins afterwards calls stock.
    """
    stock = detached(stock)
    # torch.compile takes the answer as it is when it compiles the caller.
    unknown = torch.compiler.assume_constant_result(lambda: unknown_part(stock))

    def decorate(fast: Callable) -> Callable:
        @functools.wraps(stock)
        def replacement(*args, **kwargs):
            in_force = current_options()
            if in_force is None:
                return stock(*args, **kwargs)
            try:
                # Each time: somebody may have replaced what it calls since.
                if (part := unknown()) is not None:
                    raise FallbackToHost(not_known(part))
                return fast(in_force, *args, **kwargs)
            except FallbackToHost as error:
                reason = error
            if pooled and not isinstance(in_force.pooling, Max):
                raise ValueError(
                    f"{stock.__qualname__}: with enable(pooling={in_force.pooling}) this cannot be scored, because {host}'s "
                    f"own code would have to, with the maximum: {reason}."
                )
            result = stock(*args, **kwargs)
            log_once("%s is not accelerated (running %s's own): %s.", stock.__qualname__, host, reason)
            return result

        replacement.pooled = pooled
        return replacement

    return decorate


class Replacements:
    """Patches of a host's functions, to which :meth:`of` adds stand-ins as :func:`replaces` makes them."""

    def __init__(self, host: str, pooled: bool = True) -> None:
        self._host, self._pooled = host, pooled
        self._patches: list[Patch] = []

    def patches(self) -> list[Patch]:
        """All of them, once the module that makes them is imported."""
        return self._patches

    def of(
        self, owner: ModuleType | type, name: str, needs: tuple[Callable, ...] = (), pooled: bool | None = None
    ) -> Callable[[Callable], Callable]:
        """Decorator: stand in for a function of a module or a method of a class."""

        def decorate(fast: Callable) -> Callable:
            is_pooled = self._pooled if pooled is None else pooled
            replacement = replaces(getattr(owner, name), self._host, is_pooled)(fast)
            is_static = isinstance(inspect.getattr_static(owner, name), staticmethod)
            self._patches.append(Patch(owner, name, staticmethod(replacement) if is_static else replacement, needs))
            return replacement

        return decorate


def asked_backend(variable: str) -> str | None:
    """The implementation of its scores that a host's environment variable asks for; None: it leaves the choice."""
    backend = os.environ.get(variable, "auto")
    return None if backend.lower() == "auto" else backend


def check_backend(variable: str) -> None:
    """Leave scores to stock where an environment variable asks for an implementation. Raises FallbackToHost."""
    if (backend := asked_backend(variable)) is not None:
        raise FallbackToHost(f"the environment asks for it with {variable}={backend}")


def own_documents(documents: Tensor) -> Tensor:
    """Candidates ``[B, N]`` of queries that have the documents ``[B, N, L, d]``, one after the other."""
    count, ways = documents.shape[:2]
    return torch.arange(count * ways, device=documents.device).view(count, ways)


def check(queries: Tensor, documents: Tensor, queries_dim: int, documents_dim: int) -> None:
    """Raise FallbackToHost for what the operator does not take. Stock raises for most of it, in words its users know."""
    if not isinstance(queries, Tensor) or not isinstance(documents, Tensor):
        raise FallbackToHost("embeddings are neither tensors nor arrays nor lists of them")
    if (queries.dim(), documents.dim()) != (queries_dim, documents_dim) or queries.shape[-1] != documents.shape[-1]:
        raise FallbackToHost(f"embeddings have the shapes {tuple(queries.shape)} and {tuple(documents.shape)}")
    if queries.device != documents.device:
        raise FallbackToHost(f"embeddings are on {queries.device} and {documents.device}")
    dtypes = (queries.dtype, documents.dtype)
    mixed = queries.dtype != documents.dtype and not torch.is_autocast_enabled(queries.device.type)
    if mixed or not _DTYPES.issuperset(dtypes):
        raise FallbackToHost(f"embeddings have the dtypes {dtypes[0]} and {dtypes[1]}")
