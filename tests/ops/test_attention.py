"""Attention of packed texts on a CPU: against the definition, with the projection and rotary positions, and in graphs."""

import pytest
import torch
import torch.utils.checkpoint
from transformers.models.modernbert.modeling_modernbert import apply_rotary_pos_emb

from pylate_fastmaxsim import reference
from pylate_fastmaxsim.ops.attention import rotary_self_attention, text_attention
from tests.support.attention_cases import borders, case, definition, distances, gradient_of, weights_kept

HEADS, DIM = 3, 16


def layer(rows=14, dtype=torch.float64, bias=True):
    """Arguments of :func:`rotary_self_attention`: texts of 5, 0 and 6 rows, of which 3, 2 and 6 have keys, and 3 rows behind."""
    generator = torch.Generator().manual_seed(0)

    def made(*size):
        return torch.randn(*size, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    x, weight, offset = made(rows, 24), made(3 * HEADS * DIM, 24), made(3 * HEADS * DIM) if bias else None
    angles = 9 * torch.rand(rows, DIM // 2, generator=generator).repeat(1, 2).to(dtype)
    texts = borders([5, 0, 6], "cpu"), borders([3, 2, 6], "cpu")
    return x, weight, offset, angles.cos(), angles.sin(), *texts, 6, HEADS, 0.25, 3


def separately(x, weight, bias, cos, sin, cu_seqlens, key_cu_seqlens, max_length, heads, scale, reach):
    qkv = torch.nn.functional.linear(x, weight, bias).view(len(x), 3, heads, -1)
    query, key, value = qkv.unbind(1)
    query, key = (
        vectors * cos[:, None] + torch.cat([-vectors[..., DIM // 2 :], vectors[..., : DIM // 2]], dim=-1) * sin[:, None]
        for vectors in (query, key)
    )
    states = reference.attention(query, key, value, cu_seqlens, key_cu_seqlens, scale, reach)
    return torch.nn.functional.pad(states, (0, 0, 0, 0, 0, len(x) - len(states)))


def gradients(function, arguments):
    leaves = [each for each in arguments[:3] if each is not None and each.requires_grad]
    states = function(*arguments)
    return [states.detach(), *torch.autograd.grad(states, leaves, gradient_of(states))]


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("bias", [False, True])
def test_projection_rotary_positions_and_attention(bias, dtype, tolerance):
    arguments = layer(dtype=dtype, bias=bias)
    found, wanted = (gradients(function, arguments) for function in (rotary_self_attention, separately))
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)


def test_positions_as_in_modernbert():
    qkv = torch.randn(4, 3 * HEADS * DIM).bfloat16()
    cos, sin = (values[:4].float() for values in layer()[3:5])
    texts = borders([4], "cpu")
    _, _, turned = torch.ops.pylate_fastmaxsim.rotary_self_attention(
        qkv, torch.eye(qkv.shape[1]).bfloat16(), None, cos, sin, texts, texts, 4, HEADS, 1.0, -1
    )
    query, key, value = qkv.view(4, 3, HEADS, DIM).unbind(1)
    expected = torch.stack([*apply_rotary_pos_emb(query, key, cos, sin), value], dim=1)
    assert torch.equal(turned, expected)


@pytest.mark.parametrize("frozen", [(0,), (1, 2)])
def test_gradients_that_are_not_needed(frozen):
    arguments = list(layer())
    wanted = dict(zip("xwb", gradients(rotary_self_attention, arguments)[1:], strict=True))
    for place in frozen:
        arguments[place] = arguments[place].detach()
    found = gradients(rotary_self_attention, arguments)[1:]
    kept = [gradient for place, gradient in enumerate(wanted.values()) if place not in frozen]
    assert all(map(torch.equal, found, kept))


@pytest.mark.parametrize("bias", [False, True])
def test_registration(bias):
    dropout = (torch.tensor([3]), 0.4) if bias else ()
    torch.library.opcheck(torch.ops.pylate_fastmaxsim.rotary_self_attention, (*layer(bias=bias), *dropout))
    leaves = [values.requires_grad_() for values in case([5, 7], 3)[:3]]
    torch.library.opcheck(torch.ops.pylate_fastmaxsim.text_attention, (*leaves, *case([5, 7], 3)[3:], *dropout))


def test_text_attention_is_the_definition():
    batch = case([5, 0, 16], 3, torch.float64, key_lengths=[3, 2, 16])
    leaves = [values.requires_grad_() for values in batch[:3]]
    states = text_attention(*leaves, *batch[3:])
    found = [states.detach(), *torch.autograd.grad(states, leaves, gradient_of(states))]
    assert max(distances(found, definition(batch))) < 1e-12


def test_dropout_is_drawn_anew_and_right_on_average():
    batch = case([5, 9], dtype=torch.float64)
    torch.manual_seed(0)
    draws = torch.stack([text_attention(*batch, dropout=0.3) for _ in range(2000)])
    assert not torch.equal(draws[0], draws[1])
    error = draws.std(dim=0) / len(draws) ** 0.5
    assert ((draws.mean(dim=0) - definition(batch)[0]).abs() < 5 * error).all()


def test_the_backward_drops_what_the_forward_drops():
    batch = case([5, 0, 9], 4, torch.float64, key_lengths=[4, 2, 9])
    leaves = [values.requires_grad_() for values in batch[:3]]

    def seeded(shown):
        torch.manual_seed(3)
        return text_attention(*shown, dropout=0.4)

    keep = weights_kept(batch, seeded)
    states = seeded(batch)
    found = [states.detach(), *torch.autograd.grad(states, leaves, gradient_of(states))]
    assert max(distances(found, definition(batch, keep, 0.4))) < 1e-12


@pytest.mark.parametrize("compiled", [False, True])
def test_dropout_under_checkpointing(compiled):
    arguments = layer(dtype=torch.float32)

    def dropping(*leaves):
        return rotary_self_attention(*leaves, *arguments[3:], dropout=0.4).square()

    def checkpointed(*leaves):
        return torch.utils.checkpoint.checkpoint(dropping, *leaves, use_reentrant=False)

    results = []
    for function in (dropping, checkpointed):
        function = torch.compile(function, backend="aot_eager", fullgraph=True) if compiled else function
        torch.manual_seed(5)
        results.append(gradients(function, arguments[:3]))
    for ours, wanted in zip(*results, strict=True):
        torch.testing.assert_close(ours, wanted)


@pytest.mark.parametrize("dropout", [-0.1, 1.0])
def test_dropout_out_of_range(dropout):
    with pytest.raises(ValueError, match="text_attention: dropout must be from 0 to less than 1"):
        text_attention(*case([3]), dropout=dropout)


def test_one_graph():
    compiled = torch.compile(rotary_self_attention, backend="aot_eager", fullgraph=True, dynamic=True)
    for rows in (14, 19):
        arguments = layer(rows)
        for ours, eager in zip(
            gradients(compiled, arguments), gradients(rotary_self_attention, arguments), strict=True
        ):
            torch.testing.assert_close(ours, eager)


def test_shapes_that_do_not_fit():
    arguments = layer()
    with pytest.raises(ValueError, match="d = 16, 32, 64 or 128, got shape"):
        rotary_self_attention(*arguments[:8], 9, *arguments[9:])
    for place, name in ((3, "cos"), (4, "sin")):
        wrong = list(arguments)
        wrong[place] = arguments[place][:, :8]
        with pytest.raises(ValueError, match=f"{name} must be .T, d. = .14, 16."):
            rotary_self_attention(*wrong)
