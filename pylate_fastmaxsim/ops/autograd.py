"""Ways of differentiation that the operators do not support: forward mode, and the gradients of torch.func."""

import torch
from torch import Tensor
from torch.autograd import forward_ad

from pylate_fastmaxsim._tracing import inside_transform


def refuse_other_derivatives(operator: str, *tensors: Tensor | None) -> None:
    """Raise NotImplementedError where derivatives are asked for that a registered operator cannot give.

    Forward-mode ones it would leave out silently, and what PyTorch says of those of torch.func helps nobody.
    """
    # Below 0 no tensor can carry a tangent.
    if forward_ad._current_level >= 0 and any(
        tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors
    ):
        raise NotImplementedError(
            f"{operator}: forward-mode derivatives (torch.func.jvp, jacfwd, dual numbers) are not supported; "
            "use reverse mode (backward, torch.autograd.grad)."
        )
    # A graph is traced without the tensors of the transforms in it.
    if torch.compiler.is_compiling() or not inside_transform():
        return
    if torch.is_grad_enabled() and any(tensor is not None and _is_differentiated(tensor) for tensor in tensors):
        raise NotImplementedError(
            f"{operator}: the gradients of torch.func (grad, vjp, jacrev) are not supported; "
            "use backward or torch.autograd.grad."
        )


def _is_differentiated(tensor: Tensor) -> bool:
    """Whether a transform of torch.func takes gradients of a tensor, at any level."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        if functorch.is_gradtrackingtensor(tensor) and tensor.requires_grad:
            return True
        tensor = functorch.get_unwrapped(tensor)
    return False
