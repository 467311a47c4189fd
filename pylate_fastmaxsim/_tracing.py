"""Whether a call runs eagerly on ordinary tensors: outside of graphs, dispatch modes and transforms."""

import torch
from torch import Tensor

_PLAIN = {Tensor, torch.nn.Parameter, type(None)}


def inside_transform() -> bool:
    """Whether the call is inside of torch.vmap or a transform of torch.func."""
    return torch._C._functorch.peek_interpreter_stack() is not None


# A constant of a graph. `torch.compiler.assume_constant_result` does the same, but imports the compiler.
inside_transform._dynamo_marked_constant = True


def is_plain(*tensors: Tensor | None) -> bool:
    """Whether tensors, or None for one that is not given, hold numbers, and a registered operator on them would call its function directly."""
    return (
        not torch.compiler.is_compiling()
        and _PLAIN.issuperset(map(type, tensors))
        and torch._C._len_torch_dispatch_stack() == 0
        and not torch._C._is_tracing()
        and not inside_transform()
    )


def is_plain_backward(grad: Tensor) -> bool:
    """The same of a gradient in a backward that nobody differentiates, of one batch of results."""
    # With gradients enabled second ones are asked for, which the registered operators refuse. They take a compiled
    # backward whole, and a batch of gradients once for each.
    return is_plain(grad) and not torch.is_grad_enabled() and not torch._C._functorch.is_legacy_batchedtensor(grad)
