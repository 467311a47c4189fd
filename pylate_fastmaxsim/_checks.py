"""Checks of arguments, and of how a call runs, that all operators share."""

import difflib
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import torch
from torch import Tensor

B = TypeVar("B")

_PLAIN = {Tensor, torch.nn.Parameter, type(None)}


def require_tensor(
    where: str,
    name: str,
    value: object,
    allowed: str,
    sizes: int | tuple[int | None, ...] | None = None,
    dtypes: tuple[torch.dtype, ...] = (),
    device: torch.device | None = None,
) -> None:
    """Raise TypeError unless the argument ``name`` of ``where`` is a tensor; ``allowed`` is its dtype and shape.

    ValueError if it is nested or sparse, or has another shape, dtype or device where these are given: ``sizes`` are the
    number of dimensions, or the size of each, None for any; these sizes replace each ``{}`` of ``allowed``.
    """
    if not isinstance(value, Tensor):
        raise TypeError(f"{where}: {name} must be a tensor {_filled(allowed, sizes)}, got {type(value).__name__}.")
    if value.is_nested:
        raise ValueError(
            f"{where}: {name} must be a plain tensor {_filled(allowed, sizes)}, got a nested one; token vectors x of the layout "
            "torch.jagged are TokenBatch.from_packed(x.values(), x.offsets())."
        )
    if value.layout != torch.strided:
        raise ValueError(
            f"{where}: {name} must be a dense tensor {_filled(allowed, sizes)}, got one of the layout {value.layout}."
        )
    shape = (None,) * sizes if isinstance(sizes, int) else sizes
    fits = shape is None or len(shape) == value.dim()
    if shape and fits:
        fits = all(size is None or size == got for size, got in zip(shape, value.shape, strict=True))
    if not fits or (dtypes and value.dtype not in dtypes):
        raise ValueError(
            f"{where}: {name} must be {_filled(allowed, sizes)}, got {value.dtype} of shape {tuple(value.shape)}."
        )
    if device not in (None, value.device):
        raise ValueError(f"{where}: {name} must be on {device}, as the rest, got {value.device}.")


def _filled(allowed: str, sizes: int | tuple[int | None, ...] | None) -> str:
    """The text with sizes, which is made for an error only: it would make a symbolic size of a graph a number."""
    return allowed.format(*[size for size in sizes if size is not None]) if isinstance(sizes, tuple) else allowed


def require_integer(name: str, value: object, allowed: str = "") -> int:
    """The value as a Python integer, also of NumPy's; TypeError if it is none. ``allowed`` is added to the error."""
    if isinstance(value, (int, torch.SymInt)):
        return value
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer{allowed}, got {value!r}.") from None


def require_count(where: str, name: str, value: object) -> int:
    """The argument ``name`` of ``where`` as a Python integer; TypeError or ValueError unless it is at least 1."""
    if isinstance(value, bool):
        raise TypeError(f"{where}: {name} must be an integer, at least 1, got {value!r}.")
    count = require_integer(f"{where}: {name}", value, ", at least 1")
    if count < 1:
        raise ValueError(f"{where}: {name} must be at least 1, got {count}.")
    return count


def converted_batches(
    where: str, name: str, value: object, batch: tuple[type[B], ...], ndim: int, convert: Callable[[str, object], B]
) -> Iterator[B]:
    """One batch of documents, or several, each as ``convert(name, value)`` makes it of what is no ``batch`` already.

    One batch is anything with dimensions, and a list of what has ``ndim`` dimensions: the documents. TypeError if the
    argument ``name`` of ``where`` is neither that nor an iterable.
    """

    def made(name: str, each: object) -> B:
        return each if isinstance(each, batch) else convert(name, each)

    listed = isinstance(value, (list, tuple)) and value and getattr(value[0], "ndim", None) == ndim
    if listed or hasattr(value, "ndim") or isinstance(value, batch):
        return iter([made(name, value)])
    if not isinstance(value, Iterable):
        raise TypeError(
            f"{where}: {name} must be batches of documents, as a list of {batch[0].__name__}, got {type(value).__name__}."
        )
    return (made(f"{name}[{number}]", each) for number, each in enumerate(value))


def require_positions(where: str, positions: object, count: int) -> Tensor:
    """Positions of documents, of which there are ``count``, as int64 ``[n]`` on the CPU; TypeError or ValueError else."""
    try:
        found = torch.as_tensor(positions if hasattr(positions, "__array__") else [*positions], device="cpu")
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{where}: positions must be integers, a list or a tensor [n], got {positions!r}.") from None
    if found.dim() != 1 or (len(found) and (found.is_floating_point() or found.dtype == torch.bool)):
        raise TypeError(f"{where}: positions must be integers [n], got {found.dtype} of shape {tuple(found.shape)}.")
    found = found.long()
    wrong = (found < 0) | (found >= count)
    if bool(wrong.any()):
        raise ValueError(f"{where}: positions must be from 0 to {count - 1}, got {found[wrong][0]}.")
    return found


def has_numbers(*tensors: Tensor) -> bool:
    """True if the numbers in tensors of one device can be checked without waiting for a GPU."""
    return tensors[0].is_cpu and is_plain(*tensors)


def as_mask(where: str, name: str, mask: Tensor, device: torch.device) -> Tensor:
    """The mask ``name`` of ``where`` as bool on the device; ValueError if it holds other numbers than 0 and 1.

    An additive mask, which is 0 where a token counts, would select all others. Checked on a CPU only.
    """
    if mask.dtype != torch.bool:
        counts = mask != 0
        if has_numbers(mask) and bool((other := counts & (mask != 1)).any()):
            raise ValueError(
                f"{where}: {name} must hold 1 for tokens that count and 0 for others, got {mask[other][0]}."
            )
        mask = counts
    return mask.to(device=device)


def inside_transform() -> bool:
    """True inside of torch.vmap or a transform of torch.func."""
    return torch._C._functorch.peek_interpreter_stack() is not None


# A constant of a graph. `torch.compiler.assume_constant_result` does the same, but imports the compiler.
inside_transform._dynamo_marked_constant = True


def is_plain(*tensors: Tensor | None) -> bool:
    """True if a call is eager, on tensors (or None) that hold numbers: outside of graphs, dispatch modes and transforms."""
    return (
        not torch.compiler.is_compiling()
        and _PLAIN.issuperset(map(type, tensors))
        and torch._C._len_torch_dispatch_stack() == 0
        and not torch._C._is_tracing()
        and not inside_transform()
    )


def is_plain_backward(grad: Tensor) -> bool:
    """True of a plain gradient in a backward that nobody differentiates, of one batch of results."""
    # With gradients enabled second ones are asked for, which the registered operators refuse. They take a compiled
    # backward whole, and a batch of gradients once for each.
    return is_plain(grad) and not torch.is_grad_enabled() and not torch._C._functorch.is_legacy_batchedtensor(grad)


def suggestion(name: str, names: Iterable[str], all_of: str) -> str:
    """What an error says of a name that is none of these: the nearest, or ``all_of`` and the list."""
    names = list(names)
    close = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {close[0]!r}?" if close else f"{all_of} {', '.join(names)}."
