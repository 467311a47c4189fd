"""Forward-mode differentiation, which the operators do not support."""

from torch import Tensor
from torch.autograd import forward_ad


def refuse_tangents(operator: str, *tensors: Tensor | None) -> None:
    """Raise NotImplementedError where a tensor carries a tangent, which a registered operator would leave out silently."""
    # Below 0 no tensor can.
    if forward_ad._current_level < 0:
        return
    if any(tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors):
        raise NotImplementedError(
            f"{operator}: forward-mode derivatives (torch.func.jvp, jacfwd, dual numbers) are not supported; "
            "use reverse mode (backward, torch.autograd.grad)."
        )
