"""Operators of torch.library from annotated functions: the schema, the autograd formula, and a faster eager call."""

import inspect
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import get_args, get_type_hints

import torch
from torch import SymInt, Tensor

from pylate_fastmaxsim._checks import is_plain, is_plain_backward

_SCHEMA_TYPES = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    int: "int",
    int | SymInt: "SymInt",
    float: "float",
    bool: "bool",
    torch.dtype | None: "ScalarType?",
}


class _Signature:
    """The arguments of an annotated function, with each field of a NamedTuple as an argument of its own: flat."""

    def __init__(self, function: Callable) -> None:
        signature = inspect.signature(function, eval_str=True)
        # Of each flat argument: its type, and the position of the function's argument with that of a field in it.
        self.types: dict[str, str] = {}
        self.places: dict[str, tuple[int, int | None]] = {}
        self._tuples = []
        defaults = {}
        for position, (name, parameter) in enumerate(signature.parameters.items()):
            of = parameter.annotation
            if hasattr(of, "_fields"):
                self._tuples.append((of, len(self.types), len(self.types) + len(of._fields)))
                self.types.update((field, _SCHEMA_TYPES[hint]) for field, hint in get_type_hints(of).items())
                self.places.update((field, (position, index)) for index, field in enumerate(of._fields))
                continue
            self.types[name], self.places[name] = _SCHEMA_TYPES[of], (position, None)
            if parameter.default is not parameter.empty:
                defaults[name] = f"={parameter.default}"
        self.names = list(self.types)
        arguments = ", ".join(f"{of} {name}{defaults.get(name, '')}" for name, of in self.types.items())
        results = get_args(signature.return_annotation)
        self.schema = f"({arguments}) -> " + (f"({', '.join('Tensor' for _ in results)})" if results else "Tensor")
        # Whether the function takes and returns what the operator does.
        self.is_flat = not self._tuples and all(each is Tensor for each in results)

    def packed(self, flat: Sequence) -> Sequence:
        """The arguments of the function from flat ones."""
        if not self._tuples:
            return flat
        arguments, end = [], 0
        for of, start, stop in self._tuples:
            # Not `of(...)`, which is a Python function and costs the host more.
            arguments += (*flat[end:start], tuple.__new__(of, flat[start:stop]))
            end = stop
        arguments += flat[end:]
        return arguments


def _flat(arguments: Sequence) -> list:
    flat = []
    for each in arguments:
        if isinstance(each, tuple):
            flat.extend(each)
        else:
            flat.append(each)
    return flat


def _requires_grad(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.requires_grad


class Operator:
    """``torch.ops.pylate_fastmaxsim.<name>``, which computes ``function``.

    Its schema follows from the annotations of ``function``. A NamedTuple among the parameters is an argument for each
    field, so that PyTorch sees each tensor. ``int | SymInt`` is a number that a graph may leave open. The first argument
    is a tensor. ``fake`` takes the same arguments to results without numbers, for traces; ``check``, before ``function``,
    looks at numbers, which in a graph are known only when it runs. A result of ``function`` or ``fake`` may be None, which
    is an empty tensor as a result of the operator, of one dtype, so that an exported program without gradients takes any
    length.

    Examples
    --------
    >>> import torch
    >>> from pylate_fastmaxsim._operands import PoolingNumbers
    >>> from pylate_fastmaxsim.ops.registered import Operator
    >>> def example(x: torch.Tensor, pooling: PoolingNumbers) -> torch.Tensor:
    ...     return x * pooling.temperature
    >>> example = Operator("example", example, lambda x, pooling: torch.empty_like(x))
    >>> torch.ops.pylate_fastmaxsim.example.default._schema
    pylate_fastmaxsim::example(Tensor x, int k, float temperature, bool log_sum_exp) -> Tensor
    >>> torch.ops.pylate_fastmaxsim.example(torch.ones(2), 0, 3.0, False)
    tensor([3., 3.])
    """

    def __init__(
        self,
        name: str,
        function: Callable,
        fake: Callable,
        *,
        check: Callable | None = None,
    ) -> None:
        self.name, self.function, self.signature = f"pylate_fastmaxsim::{name}", function, _Signature(function)
        # A schema rather than `torch.library.custom_op`, whose wrappers cost the host more per call.
        torch.library.define(self.name, self.signature.schema, tags=torch.Tag.pt2_compliant_tag)
        torch.library.impl(self.name, "CompositeExplicitAutograd", self._of_flat(function, check))
        torch.library.register_fake(self.name, self._of_flat(fake))
        self.dispatched = getattr(torch.ops.pylate_fastmaxsim, name)

    def _of_flat(self, function: Callable, check: Callable | None = None) -> Callable:
        if self.signature.is_flat and check is None:
            return function

        def call(*flat):
            arguments = self.signature.packed(flat)
            if check is not None:
                check(*arguments)
            results = function(*arguments)
            if isinstance(results, Tensor):
                return results
            return tuple([flat[0].new_empty((0, 0), dtype=torch.uint8) if each is None else each for each in results])

        return call


def fake_linear_gradients(grad: Tensor, x: Tensor, weight: Tensor, *others: object) -> Sequence[Tensor | None]:
    """Gradients of the operands of ``linear``, as a graph is traced with; the last of ``others`` say which are needed."""
    shapes = x.shape, weight.shape, weight.shape[:1]
    return [weight.new_empty(shape) if need else None for shape, need in zip(shapes, others[-3:], strict=True)]


def differentiable(
    forward: Operator,
    results: Sequence[str],
    inputs: Sequence[str],
    backward: Operator | Callable,
    where: str | None = None,
) -> Callable[..., tuple[Tensor | None, ...]]:
    """Register the autograd formula of ``forward``; return a function that calls it in less host time.

    ``forward`` is an operator whose first result has a gradient, ``results`` are the names of its results, ``inputs`` of its
    arguments, tensors or None, that have one. Its last argument may be a ``want_...``: whether a backward is wanted, without
    which it keeps nothing for it.

    ``backward`` is an operator, or a function with annotations, from the gradient of the first result to gradients of
    ``inputs``. Further parameters are arguments and results of ``forward``, by name; they are saved. The last may be a
    ``need_...`` for each of ``inputs``. ``where`` is the name in errors; with None second derivatives are not refused, since
    ``backward`` uses autograd itself.

    The function that is returned takes the arguments of ``forward.function``, which returns several results. Outside of
    graphs and transforms it calls this itself: the dispatcher costs the host more than a launch, and the formula of a
    registered operator three times that of a ``torch.autograd.Function``, which a compiled graph does not take.
    """
    function, dispatched, names = forward.function, forward.dispatched, forward.signature.names
    indices = [names.index(name) for name in inputs]
    places = [forward.signature.places[name] for name in inputs]
    wants = names[-1].startswith("want_")
    registered = isinstance(backward, Operator)
    signature = backward.signature if registered else _Signature(backward)
    compute = backward.function if registered else backward
    takes_needs = signature.names[-1].startswith("need_")
    saved = [name for name in signature.names[1:] if not name.startswith("need_")]
    tensors_first = sorted(saved, key=lambda name: not signature.types[name].startswith("Tensor"))
    num_tensors = sum(signature.types[name].startswith("Tensor") for name in saved)
    # What is saved: tensors for autograd first, then numbers; `order` puts them back in the order of `backward`.
    of_saved = itemgetter(*[[*names, *results].index(name) for name in tensors_first])
    order = [tensors_first.index(name) for name in saved] if saved != tensors_first else None

    def save(ctx, flat: Sequence, computed: Sequence[Tensor]) -> None:
        kept = of_saved([*flat, *computed])
        ctx.save_for_backward(*kept[:num_tensors])
        ctx.numbers = kept[num_tensors:]
        ctx.recorded = flat[-1] if wants else True
        ctx.set_materialize_grads(False)

    def gradients(ctx, grad: Tensor | None, needs: Sequence[bool]) -> Sequence[Tensor | None]:
        if grad is None:
            return [None] * len(inputs)
        if not ctx.recorded:
            # All gradients would be 0.
            raise RuntimeError(
                f"{where}: these scores pass no gradient, because they come from a graph that was traced with vectors that "
                "required none; trace or export it with vectors that require a gradient."
            )
        kept = ctx.saved_tensors + ctx.numbers
        kept = kept if order is None else [kept[index] for index in order]
        flat = (grad, *kept, *needs) if takes_needs else (grad, *kept)
        if registered and not is_plain_backward(grad):
            computed = backward.dispatched(*flat)
        else:
            computed = compute(*signature.packed(flat))
        if isinstance(computed, Tensor):
            computed = (computed,)
        return computed if all(needs) else [each if need else None for each, need in zip(computed, needs, strict=True)]

    def differentiate(ctx, grad, *_):
        by_argument = [None] * len(names)
        needs = [ctx.needs_input_grad[index] for index in indices]
        for index, each in zip(indices, gradients(ctx, grad, needs), strict=True):
            by_argument[index] = each
        return tuple(by_argument)

    def setup_context(ctx, inputs, output):
        save(ctx, inputs, (output,) if isinstance(output, Tensor) else output)

    def differentiate_twice(ctx, *_):
        raise NotImplementedError(
            f"{where}: second derivatives are not supported; its backward cannot be differentiated."
        )

    torch.library.register_autograd(forward.name, differentiate, setup_context=setup_context)
    if registered and where is not None:
        torch.library.register_autograd(backward.name, differentiate_twice)

    class Eager(torch.autograd.Function):
        # The tensors are among the arguments, named once more for autograd to see them.
        @staticmethod
        def forward(ctx, plain, arguments, *_):
            flat = _flat(arguments)
            computed = function(*arguments) if plain else dispatched(*flat)
            ctx.mark_non_differentiable(*computed[1:])
            save(ctx, flat, computed)
            return computed

        @staticmethod
        def backward(ctx, grad, *_):
            return None, None, *gradients(ctx, grad, ctx.needs_input_grad[2:])

    def call(*arguments):
        tensors = [arguments[at] if field is None else arguments[at][field] for at, field in places]
        plain = is_plain(*tensors)
        if not plain and torch.compiler.is_compiling():
            return dispatched(*_flat(arguments))
        if arguments[-1] if wants else torch.is_grad_enabled() and any(map(_requires_grad, tensors)):
            return Eager.apply(plain, arguments, *tensors)
        return function(*arguments) if plain else dispatched(*_flat(arguments))

    return call
