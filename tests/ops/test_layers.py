"""Attention of packed texts and the operators of encoder layers on a CPU: against plain PyTorch, dropout, and graphs."""

from functools import partial

import pytest
import torch
import torch.utils.checkpoint
from torch.nn.functional import gelu, layer_norm, linear

from pylate_fastmaxsim import reference
from pylate_fastmaxsim.ops.encoder.attention import rotary_self_attention, text_attention
from pylate_fastmaxsim.ops.encoder.layers import geglu_linear, norm_with_residual
from tests.support.attention_cases import case, definition, distances, gradient_of, rotary_arguments, weights_kept
from tests.support.layer_cases import glu_case, gradients, norm_case


def plain_glu(x, weight, bias):
    inputs, gate = x.chunk(2, dim=1)
    return linear(gelu(inputs) * gate, weight, bias)


def plain_norm(x, weight, bias, eps, branch, dtype):
    total = x if branch is None else x + branch
    return layer_norm(total, weight.shape, weight, bias, eps).to(dtype), total


def plain_rotary(x, weight, bias, cos, sin, cu_seqlens, key_cu_seqlens, max_length, heads, scale, reach):
    query, key, value = linear(x, weight, bias).view(len(x), 3, heads, -1).unbind(1)
    half = query.shape[-1] // 2
    query, key = (
        vectors * cos[:, None] + torch.cat([-vectors[..., half:], vectors[..., :half]], dim=-1) * sin[:, None]
        for vectors in (query, key)
    )
    states = reference.attention(query, key, value, cu_seqlens, key_cu_seqlens, scale, reach)
    return torch.nn.functional.pad(states, (0, 0, 0, 0, 0, len(x) - len(states)))


def norm(rows, dtype, bias, branch=True):
    arguments = norm_case(rows, 24, "cpu", dtype, bias)
    return arguments if branch else (*arguments[:4], None, arguments[5])


LAYERS = {
    "glu": (geglu_linear, plain_glu, lambda rows, dtype, bias: glu_case(rows, 24, "cpu", dtype, bias)),
    "norm": (norm_with_residual, plain_norm, norm),
    "norm without branch": (norm_with_residual, plain_norm, partial(norm, branch=False)),
    "rotary attention": (rotary_self_attention, plain_rotary, rotary_arguments),
}
of_all = pytest.mark.parametrize("function, plain, made", LAYERS.values(), ids=LAYERS)


@of_all
@pytest.mark.parametrize("bias", [False, True])
def test_as_plain_pytorch(function, plain, made, bias):
    arguments = made(14, torch.float64, bias)
    found, wanted = (gradients(each, arguments) for each in (function, plain))
    torch.testing.assert_close(found, wanted, atol=1e-12, rtol=1e-12)
    # Each gradient alone.
    places = [place for place, each in enumerate(arguments) if isinstance(each, torch.Tensor) and each.requires_grad]
    for place, gradient in zip(places, found[-len(places) :], strict=True):
        alone = [each.detach() if isinstance(each, torch.Tensor) else each for each in arguments]
        alone[place].requires_grad_()
        assert torch.equal(gradients(function, alone)[-1], gradient)


@of_all
def test_one_graph(function, plain, made):
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=True)
    for rows in (14, 19):
        arguments = made(rows, None if made is norm else torch.float32, plain is not plain_norm or made is norm)
        torch.testing.assert_close(gradients(compiled, arguments), gradients(function, arguments))


@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_text_attention_is_the_definition(dropout):
    """The backward drops what the forward drops."""
    batch = case([5, 0, 9], 4, torch.float64, key_lengths=[4, 2, 9])
    leaves = [values.requires_grad_() for values in batch[:3]]

    def seeded(shown):
        torch.manual_seed(3)
        return text_attention(*shown, dropout=dropout)

    states = seeded(batch)
    found = [states.detach(), *torch.autograd.grad(states, leaves, gradient_of(states))]
    keep = weights_kept(batch, seeded) if dropout else None
    assert max(distances(found, definition(batch, keep, dropout))) < 1e-12


def test_dropout_is_drawn_anew_and_right_on_average():
    batch = case([5, 9], dtype=torch.float64)
    torch.manual_seed(0)
    draws = torch.stack([text_attention(*batch, dropout=0.3) for _ in range(400)])
    assert not torch.equal(draws[0], draws[1])
    error = draws.std(dim=0) / len(draws) ** 0.5
    assert ((draws.mean(dim=0) - definition(batch)[0]).abs() < 5 * error).all()


@pytest.mark.parametrize("compiled", [False, True])
def test_dropout_under_checkpointing(compiled):
    arguments = rotary_arguments(dtype=torch.float32)

    def dropping(*leaves):
        return rotary_self_attention(*leaves, *arguments[3:], dropout=0.4).square()

    def checkpointed(*leaves):
        return torch.utils.checkpoint.checkpoint(dropping, *leaves, use_reentrant=False)

    results = []
    for function in (dropping, checkpointed):
        function = torch.compile(function, backend="aot_eager", fullgraph=True) if compiled else function
        torch.manual_seed(5)
        results.append(gradients(function, arguments[:3]))
    torch.testing.assert_close(*results)
