"""What no operator supports: torch.vmap, torch.func and forward-mode derivatives."""

from torch.autograd import forward_ad

from pylate_fastmaxsim._tracing import inside_transform


def refuse_transforms(operator: str) -> None:
    """Raise NotImplementedError inside of torch.vmap, a transform of torch.func or a level of forward-mode derivatives.

    A registered operator would leave forward-mode derivatives out silently.
    """
    if inside_transform() or forward_ad._current_level >= 0:
        raise NotImplementedError(
            f"{operator}: torch.vmap, torch.func (grad, vjp, jvp, ...) and forward-mode derivatives are not supported; call "
            "it on whole batches, and differentiate with backward or torch.autograd.grad."
        )
