"""Whether a call runs eagerly on ordinary tensors: outside of graphs, dispatch modes and transforms."""

import torch
from torch import Tensor

_PLAIN = {Tensor, torch.nn.Parameter}


def inside_transform() -> bool:
    """Whether the call is inside of torch.vmap or a transform of torch.func."""
    return torch._C._functorch.peek_interpreter_stack() is not None


# A constant of a graph. `torch.compiler.assume_constant_result` does the same, but imports the compiler.
inside_transform._dynamo_marked_constant = True


def is_plain(*tensors: Tensor) -> bool:
    """Whether tensors hold numbers, and a registered operator on them would call its function directly."""
    return (
        not torch.compiler.is_compiling()
        and _PLAIN.issuperset(map(type, tensors))
        and torch._C._len_torch_dispatch_stack() == 0
        and not torch._C._is_tracing()
        and not inside_transform()
    )
