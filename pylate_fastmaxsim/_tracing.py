"""Whether a call runs as it is written: outside of graphs, modes and transforms, on tensors that are what they seem."""

import torch
from torch import Tensor

_PLAIN = {Tensor, torch.nn.Parameter}


def inside_transform() -> bool:
    """Whether the call is inside of torch.vmap or a transform of torch.func.

    There a tensor may require no gradient although it is a part of one that does.
    """
    return torch._C._functorch.peek_interpreter_stack() is not None


# A constant of a graph, whose tracer has the transforms as they are there. `torch.compiler.assume_constant_result` does
# the same, but imports the compiler.
inside_transform._dynamo_marked_constant = True


def is_plain(*tensors: Tensor) -> bool:
    """Whether tensors hold numbers of their own, and a registered operator on them comes straight to its function."""
    return (
        not torch.compiler.is_compiling()
        and _PLAIN.issuperset(map(type, tensors))
        and torch._C._len_torch_dispatch_stack() == 0
        and not torch._C._is_tracing()
        and not inside_transform()
    )
