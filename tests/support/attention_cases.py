"""Batches of texts for the tests of attention, and how far a result is from the definition in float64."""

from collections import namedtuple
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from pylate_fastmaxsim import reference


class Case(NamedTuple):
    query: Tensor
    key: Tensor
    value: Tensor
    cu_seqlens: Tensor
    key_cu_seqlens: Tensor
    max_length: int
    scale: float
    reach: int


def borders(lengths: list[int], device: str) -> Tensor:
    return torch.tensor([0, *lengths], device=device).cumsum(0).int()


def case(
    lengths: list[int],
    reach: int = -1,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    heads: int = 2,
    dim: int = 16,
    key_lengths: list[int] | None = None,
    by_head: bool = True,
) -> Case:
    """``by_head``: queries and keys lie head by head, as rotary positions leave them."""
    generator = torch.Generator().manual_seed(sum(lengths))
    key_lengths = lengths if key_lengths is None else key_lengths
    query, key, value = (
        torch.randn(sum(count), heads, dim, generator=generator).to(device, dtype)
        for count in (lengths, key_lengths, key_lengths)
    )
    if by_head:
        query, key = (each.transpose(0, 1).contiguous().transpose(0, 1) for each in (query, key))
    longest = max([1, *lengths, *key_lengths])
    return Case(query, key, value, borders(lengths, device), borders(key_lengths, device), longest, dim**-0.5, reach)


def gradient_of(states: Tensor) -> Tensor:
    return torch.randn(states.shape, generator=torch.Generator().manual_seed(1)).to(states)


def definition(batch: Case, keep: Tensor | None = None, dropout: float = 0.0) -> list[Tensor]:
    """States and the three gradients, in float64."""
    leaves = [values.detach().double().requires_grad_() for values in batch[:3]]
    borders = batch.cu_seqlens, batch.key_cu_seqlens
    states = reference.attention(*leaves, *borders, batch.scale, batch.reach, keep, dropout)
    gradient = gradient_of(batch.query.new_empty(states.shape)).double()
    return [states.detach(), *torch.autograd.grad((states * gradient).sum(), leaves)]


def weights_kept(batch: Case, forward: Callable[[Case], Tensor]) -> Tensor:
    """Weights that the dropout of ``forward`` keeps, ``[heads, T, max_length]``: made visible by values that are rows of an identity."""
    rows, heads, dim = batch.query.shape
    positions = torch.cat([torch.arange(count) for count in batch.key_cu_seqlens.diff().tolist()]).to(batch.key.device)
    seen = []
    for first in range(0, batch.max_length, dim):
        value = torch.nn.functional.one_hot((positions - first).clamp(-1, dim) + 1, dim + 2)[:, None, 1:-1]
        value = value.expand(-1, heads, -1).to(batch.value).contiguous()
        seen.append(forward(batch._replace(query=torch.zeros_like(batch.query), value=value, reach=-1)) != 0)
    return torch.cat(seen, dim=2)[..., : batch.max_length].transpose(0, 1)


RotaryCase = namedtuple("RotaryCase", ["qkv", "cos", "sin", *Case._fields[3:]])


def rotary_case(lengths: list[int], *options, behind: int = 0, **named) -> RotaryCase:
    """Rows of random positions, ``behind`` of them behind the last text; the options are those of ``case``."""
    plain = case(lengths, *options, **named)
    generator = torch.Generator().manual_seed(2)
    rows, (_, heads, dim) = sum(lengths) + behind, plain.query.shape
    device, dtype = plain.query.device, plain.query.dtype
    qkv = torch.randn(rows, 3, heads, dim, generator=generator).to(device, dtype)
    angles = 9 * torch.randn(rows, dim // 2, generator=generator).repeat(1, 2).to(device)
    return RotaryCase(qkv, angles.cos(), angles.sin(), *plain[3:])


def rotary_definition(batch: RotaryCase) -> list[Tensor]:
    """States and the gradient of ``qkv``, in float64 but for the rounding of turned vectors."""
    leaf = batch.qkv.detach().double().requires_grad_()
    cos, sin = batch.cos.double()[:, None], batch.sin.double()[:, None]

    def turned(vectors):
        first, second = vectors.chunk(2, dim=-1)
        exact = vectors * cos + torch.cat([-second, first], dim=-1) * sin
        return exact + (exact.to(batch.qkv.dtype).double() - exact).detach()

    query, key, value = leaf.unbind(1)
    borders = batch.cu_seqlens, batch.key_cu_seqlens
    states = reference.attention(turned(query), turned(key), value, *borders, batch.scale, batch.reach)
    states = torch.nn.functional.pad(states, (0, 0, 0, 0, 0, len(leaf) - len(states)))
    gradient = gradient_of(batch.qkv.new_empty(states.shape)).double()
    return [states.detach(), *torch.autograd.grad((states * gradient).sum(), leaf)]


def distances(found: list[Tensor], exact: list[Tensor]) -> list[float]:
    """Of each result, relative to its length or, where that is less, to 1."""
    pairs = zip(found, exact, strict=True)
    return [float((ours.double() - wanted).norm() / wanted.norm().clamp(min=1)) for ours, wanted in pairs]


def rotary_arguments(rows: int = 14, dtype: torch.dtype = torch.float64, bias: bool = True, heads: int = 3) -> tuple:
    """Of ``rotary_self_attention``: texts of 5, 0 and 6 rows, of which 3, 2 and 6 have keys, and rows behind."""
    generator = torch.Generator().manual_seed(0)

    def made(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    x, weight, offset = made(rows, 24), made(3 * heads * 16, 24), made(3 * heads * 16) if bias else None
    angles = 9 * torch.rand(rows, 8, generator=generator).repeat(1, 2).to(dtype)
    texts = borders([5, 0, 6], "cpu"), borders([3, 2, 6], "cpu")
    return x, weight, offset, angles.cos(), angles.sin(), *texts, 6, heads, 0.25, 3
