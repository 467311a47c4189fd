"""Attention of short texts on a GPU: against the definition in float64 and FlashAttention, and in training steps."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
import torch
from pylate import losses

import pylate_fastmaxsim
from pylate_fastmaxsim.integrations.encoding import attention as encoding_attention
from pylate_fastmaxsim.integrations.encoding.attention import variable_length_attention
from pylate_fastmaxsim.ops import attention as operator
from pylate_fastmaxsim.ops.attention import is_faster, rotary_self_attention, text_attention
from tests.support.attention_cases import (
    case,
    definition,
    distances,
    gradient_of,
    rotary_case,
    rotary_definition,
    weights_kept,
)
from tests.support.losses_cuda import assert_as_exact, batch_of, losses_of, stock_losses
from tests.support.models import load_model
from tests.support.on_gpu import no_waiting

pytestmark = pytest.mark.cuda

BOUND = {torch.bfloat16: 4e-3, torch.float16: 6e-4}


def on_gpu(lengths, reach=-1, dtype=torch.bfloat16, heads=3, dim=64, **options):
    return case(lengths, reach, dtype, "cuda", heads, dim, **options)


def run(batch, gradient=None):
    leaves = [values.detach().requires_grad_() for values in batch[:3]]
    states = text_attention(*leaves, *batch[3:])
    gradient = gradient_of(states) if gradient is None else gradient
    return [states.detach(), *torch.autograd.grad(states, leaves, gradient)]


def check(batch):
    assert max(distances(run(batch), definition(batch))) < BOUND[batch.query.dtype]


@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize("by_head", [False, True])
@pytest.mark.parametrize("reach", [-1, 0, 7, 64, 128])
def test_lengths_and_windows(reach, by_head, dtype):
    check(on_gpu([1, 5, 0, 63, 64, 65, 127, 128, 129, 300, 700, 16], reach, dtype, by_head=by_head))


@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize("dim", [32, 96, 128])
@pytest.mark.parametrize("reach", [-1, 64])
def test_head_sizes(reach, dim, dtype):
    check(on_gpu([1, 5, 0, 31, 32, 33, 64, 65, 128, 129, 300, 700], reach, dtype, dim=dim, by_head=False))


@pytest.mark.parametrize("dim", [32, 64, 96, 128])
@pytest.mark.parametrize("reach", [-1, 64])
def test_dropout(reach, dim):
    batch, dropout = on_gpu([1, 5, 0, 31, 33, 65, 128, 129, 300], reach, dim=dim), 0.2
    seed = torch.cuda.get_rng_state()

    def seeded(shown):
        torch.cuda.set_rng_state(seed)
        return text_attention(*shown, dropout=dropout)

    keep = weights_kept(batch, seeded)
    leaves = [values.detach().requires_grad_() for values in batch[:3]]
    torch.cuda.set_rng_state(seed)
    with no_waiting():
        states = text_attention(*leaves, *batch[3:], dropout=dropout)
    found = [states.detach(), *torch.autograd.grad(states, leaves, gradient_of(states))]
    assert max(distances(found, definition(batch, keep, dropout))) < BOUND[torch.bfloat16]


def test_dropout_on_average():
    batch = on_gpu([5, 40, 90, 200], heads=2)
    draws = torch.stack([text_attention(*batch, dropout=0.3).double() for _ in range(1000)])
    assert not torch.equal(draws[0], draws[1])
    error = draws.std(dim=0) / len(draws) ** 0.5
    # Beside chance there is the rounding to bf16.
    exact = definition(batch)[0]
    assert ((draws.mean(dim=0) - exact).abs() < 6 * error + 0.01 * exact.abs().mean()).all()


def test_dropout_in_a_captured_graph():
    """The seed is drawn inside of the graph, so that each replay drops other weights."""
    batch = on_gpu([5, 40, 90, 200], heads=2)
    for _ in range(2):
        text_attention(*batch, dropout=0.3)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        states = text_attention(*batch, dropout=0.3)
    graph.replay()
    first = states.clone()
    graph.replay()
    assert not torch.equal(first, states)


@pytest.mark.parametrize("seed", range(16))
def test_random_texts(seed):
    generator = torch.Generator().manual_seed(seed)

    def pick(*options):
        return options[int(torch.randint(len(options), (1,), generator=generator))]

    longest = pick(20, 64, 100, 300, 1500)
    lengths = torch.randint(0, longest + 1, (pick(1, 7, 90),), generator=generator).tolist()
    keys = torch.randint(0, longest + 1, (len(lengths),), generator=generator).tolist() if pick(False, True) else None
    batch = on_gpu(
        lengths, pick(-1, 3, 64, 500), pick(*BOUND), pick(1, 2, 12), pick(16, 24, 32, 64, 72, 96, 128), key_lengths=keys
    )
    check(batch)


@pytest.mark.parametrize("reach", [-1, 64])
def test_as_exact_as_flash_attention(reach):
    batch = on_gpu([11] * 64 + [30, 80, 90, 140, 290] * 12, reach, heads=12)
    leaves = [values.detach().requires_grad_() for values in batch[:3]]
    states = torch.ops.aten._flash_attention_forward(
        *leaves, *batch[3:5], batch.max_length, batch.max_length, 0.0, False, False,
        scale=batch.scale, window_size_left=reach, window_size_right=reach,
    )[0]  # fmt: skip
    flash = [states.detach(), *torch.autograd.grad(states, leaves, gradient_of(states))]
    exact = definition(batch)
    for ours, theirs in zip(distances(run(batch), exact), distances(flash, exact), strict=True):
        assert ours <= 1.1 * theirs


def test_runs_repeat_bit_by_bit():
    batch = on_gpu([11] * 64 + [30, 80, 90, 140, 290] * 12, 64, heads=12)
    first = run(batch)
    for _ in range(20):
        assert all(map(torch.equal, first, run(batch)))


def test_slices_of_one_product():
    query, key, value = torch.randn(40, 3, 2, 64, device="cuda", dtype=torch.bfloat16).unbind(1)
    check(on_gpu([8, 32], heads=2)._replace(query=query, key=key, value=value))


def projected(batch):
    """Arguments of the operator that projects, whose product is the case's ``qkv``."""
    rows, _, heads, dim = batch.qkv.shape
    qkv = batch.qkv.flatten(1).detach().requires_grad_()
    return qkv, torch.eye(3 * heads * dim).to(qkv), None, *batch[1:6], heads, *batch[6:]


@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize("reach", [-1, 0, 64])
def test_rotary_positions(reach, dtype):
    lengths = [1, 5, 0, 63, 64, 65, 127, 128, 129, 300, 700, 16]
    keys = [1, 4, 1, 60, 64, 65, 120, 135, 100, 329, 650, 30]
    for key_lengths in (None, keys):
        batch = rotary_case(lengths, reach, dtype, "cuda", 3, 64, key_lengths, behind=200)
        arguments = projected(batch)
        states = rotary_self_attention(*arguments)
        (gradient,) = torch.autograd.grad(states, arguments[0], gradient_of(states))
        wanted = rotary_definition(batch)
        assert max(distances([states, gradient.view(batch.qkv.shape)], wanted)) < BOUND[dtype]
        assert not states[-200:].any() and not gradient[-200:].any(), "rows of no text"


def test_rotary_positions_repeat_bit_by_bit():
    arguments = projected(rotary_case([11] * 64 + [30, 80, 90, 140, 290] * 12, 64, torch.bfloat16, "cuda", 12, 64))
    gradient = gradient_of(rotary_self_attention(*arguments))

    def step():
        states = rotary_self_attention(*arguments)
        return [states, *torch.autograd.grad(states, arguments[0], gradient)]

    first = step()
    with no_waiting():
        again = [step() for _ in range(5)]
    assert all(torch.equal(*pair) for results in again for pair in zip(first, results, strict=True))


def test_registered_rotary_operator():
    x = torch.randn(205, 48, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight, bias = (
        torch.randn(*size, device="cuda", dtype=torch.bfloat16, requires_grad=True) for size in ((384, 48), (384,))
    )
    batch = rotary_case([5, 70, 130], 64, torch.bfloat16, "cuda", 2, 64)
    arguments = (x, weight, bias, *batch[1:6], 2, *batch[6:])
    torch.library.opcheck(torch.ops.pylate_fastmaxsim.rotary_self_attention, arguments, raise_exception=True)


def test_registered_operator():
    batch = on_gpu([5, 70, 130], 64)
    leaves = [values.detach().requires_grad_() for values in batch[:3]]
    torch.library.opcheck(torch.ops.pylate_fastmaxsim.text_attention, (*leaves, *batch[3:]), raise_exception=True)


def test_nothing_waits_for_the_device():
    batch = on_gpu([5, 70, 130], 64)
    gradient = gradient_of(run(batch)[0])
    with no_waiting():
        run(batch, gradient)


def test_when_it_is_chosen():
    def chosen(lengths, window=(-1, -1), dropout=0.0, heads=2, key_heads=2, dim=64):
        query, key = (
            torch.empty(sum(lengths), count, dim, device="cuda", dtype=torch.bfloat16) for count in (heads, key_heads)
        )
        return is_faster(query, key, torch.empty(len(lengths) + 1), max(lengths), window, dropout)

    short, long = [80] * 240, [600] * 40
    measured_here = torch.cuda.get_device_capability()[0] == 9
    assert chosen(short) == chosen(short, (64, 64)) == chosen(long, (64, 64)) == measured_here
    assert not chosen(long) and not chosen([*short, 1025])
    assert not chosen(short[:200]), "a batch that waits for the host"
    assert not chosen(short, (-1, 0)) and not chosen(short, (64, 0)), "causal"
    up_to_80, up_to_48 = [(64, 0.1), (32, 0.0)], [(32, 0.1), (96, 0.0), (128, 0.0)]
    assert all(chosen(short, dim=dim, dropout=dropout) == measured_here for dim, dropout in up_to_80)
    assert not any(chosen([100] * 200, dim=dim, dropout=dropout) for dim, dropout in up_to_80), "not measured"
    assert not any(chosen(short, dim=dim, dropout=dropout) for dim, dropout in up_to_48), "no faster"
    shorter = [48] * 400
    assert all(chosen(shorter, dim=dim, dropout=dropout) == measured_here for dim, dropout in up_to_48)
    assert not chosen(shorter, (64, 64), dim=32) and not chosen(shorter, dim=96, dropout=0.1), "not measured, slower"
    assert not chosen(short, heads=4) and not chosen(short, dim=48)


def test_vectors_that_the_kernels_do_not_take():
    for wrong in (on_gpu([5], dtype=torch.float32), on_gpu([5], dim=20), on_gpu([5], dim=136)):
        with pytest.raises(
            ValueError, match="text_attention: on CUDA vectors must be bfloat16 or float16, of a multiple"
        ):
            text_attention(*wrong)


@pytest.fixture
def chosen(monkeypatch):
    """The operator, which batches of any size call; says whether it was called."""
    monkeypatch.setattr(operator, "FEWEST_TOKENS", 0)
    monkeypatch.setattr(encoding_attention, "text_attention", counted := Mock(wraps=text_attention))
    return counted


def test_in_the_place_of_flash_attention(chosen):
    batch = on_gpu([5, 70, 130], 20, heads=4)
    states = variable_length_attention(
        *batch[:4], batch.max_length, scale=None, window=(20, 20), dropout=0.0, key_cu_seqlens=batch.key_cu_seqlens
    )
    assert chosen.called and max(distances([states], definition(batch)[:1])) < BOUND[torch.bfloat16]


@pytest.mark.parametrize(
    "loss_class, options", [(losses.Contrastive, {}), (losses.CachedContrastive, {"mini_batch_size": 5})]
)
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_losses_and_gradients(encoder, chosen, compiled, checkpointing, loss_class, options):
    model = load_model(
        encoder("modernbert", hidden_size=128, num_attention_heads=2, intermediate_size=96, local_attention=24),
        document_length=48,
        device="cuda",
    )
    batches = [batch_of(model, seed, count) for seed, count in ((0, 16), (5, 9))]
    expected = stock_losses(model, batches, loss_class, **options)
    if checkpointing:
        model[0].auto_model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    pylate_fastmaxsim.enable(compile=compiled)
    assert_as_exact(losses_of(model, batches, loss_class, **options), expected)
    assert chosen.called
