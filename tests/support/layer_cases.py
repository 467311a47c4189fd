"""Arguments of the operators of encoder layers, as under autocast, and their gradients."""

from collections.abc import Callable

import torch
from torch import Tensor


def glu_case(rows, dim, device, dtype=torch.bfloat16, bias=True, like=None):
    """``like``: the same numbers as these arguments."""
    sizes = (rows, 2 * 48), (dim, 48), (dim,) if bias else None
    return tuple(_made(sizes, [dtype] * 3, device, like))


def norm_case(rows, dim, device, dtype=None, bias=True, like=None):
    """A float32 stream, what is added in bfloat16, and a norm in bfloat16; or all of ``dtype``."""
    wide, narrow = dtype or torch.float32, dtype or torch.bfloat16
    sizes = (rows, dim), (dim,), (dim,) if bias else None, (rows, dim)
    values = like and (*like[:3], like[4])
    x, weight, offset, branch = _made(sizes, [wide] * 3 + [narrow], device, values)
    return x, weight, offset, 1e-5, branch, narrow


def _made(sizes, dtypes, device, like) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(0)
    values = like or [size and torch.randn(size, generator=generator) for size in sizes]
    return [
        None if value is None else value.detach().to(device, dtype).requires_grad_()
        for value, dtype in zip(values, dtypes, strict=False)
    ]


def gradients(function: Callable, arguments: tuple) -> list[Tensor]:
    leaves = [each for each in arguments if isinstance(each, Tensor) and each.requires_grad]
    results = function(*arguments)
    results = results if isinstance(results, tuple) else (results,)
    generator = torch.Generator().manual_seed(1)
    of_results = [torch.randn(result.shape, generator=generator).bfloat16().to(result) for result in results]
    return [*(result.detach() for result in results), *torch.autograd.grad(results, leaves, of_results)]
