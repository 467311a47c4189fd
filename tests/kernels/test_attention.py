"""Attention of texts in Triton's interpreter (TRITON_INTERPRET=1) and on a GPU: against the definition in float64,
FlashAttention, and in training steps.
"""

from unittest.mock import Mock

import pytest
import torch

pytest.importorskip("triton")

import pylate_fastmaxsim
from pylate_fastmaxsim.integrations.encoding import attention as encoding_attention
from pylate_fastmaxsim.integrations.encoding.attention import variable_length_attention
from pylate_fastmaxsim.kernels.attention import launch
from pylate_fastmaxsim.ops.encoder import attention as operator
from pylate_fastmaxsim.ops.encoder.attention import is_faster, rotary_self_attention, text_attention
from tests.support.attention_cases import (
    case,
    definition,
    distances,
    gradient_of,
    rotary_case,
    rotary_definition,
    weights_kept,
)
from tests.support.interpreter import interpreted  # noqa: F401
from tests.support.on_gpu import captured, no_waiting
from tests.support.operator_checks import uninitialized_memory_as_nan

# Small tiles: the interpreter pays per operation, and several must take part. Of both kinds, and of long texts only.
TILES = launch.Tiles((launch.Tile(16, 4), launch.Tile(32, 4)), launch.Tile(16, 4))
LONG = launch.Tiles((), launch.Tile(16, 4))
BOTH = pytest.mark.parametrize("tiles", [TILES, LONG], ids=["both", "long"])
LENGTHS = [5, 0, 16, 17, 1, 70, 32, 33]
HALF = torch.bfloat16, torch.float16


def outcome(batch, tiles=None, gradient=None, **dropout):
    """States and gradients: by launches with these tiles, or by the operator."""
    if tiles is None:
        leaves = [values.detach().requires_grad_() for values in batch[:3]]
        states = text_attention(*leaves, *batch[3:], **dropout)
        gradient = gradient_of(states) if gradient is None else gradient
        return [states.detach(), *torch.autograd.grad(states, leaves, gradient)]
    with uninitialized_memory_as_nan():
        states, log_sums = launch.forward(*batch, tiles=tiles, **dropout)
        given = gradient_of(states), *batch[:3], states, log_sums, *batch[3:]
        return [states, *launch.backward(*given, tiles=tiles, **dropout)]


def rotary(batch, tiles=None, **dropout):
    """States and the gradient of ``qkv``; the operator gets the case's ``qkv`` as its product."""
    if tiles is None:
        heads, dim = batch.qkv.shape[2:]
        qkv = batch.qkv.flatten(1).detach().requires_grad_()
        eye = torch.eye(3 * heads * dim).to(qkv)
        states = rotary_self_attention(qkv, eye, None, *batch[1:6], heads, *batch[6:], **dropout)
        return [states.detach(), torch.autograd.grad(states, qkv, gradient_of(states))[0].view(batch.qkv.shape)]
    qkv = batch.qkv.clone()
    with uninitialized_memory_as_nan():
        states, log_sums = launch.rotary_forward(qkv, *batch[1:], tiles=tiles, **dropout)
        given = gradient_of(states), qkv, *batch[1:3], states, log_sums, *batch[3:]
        return [states, launch.rotary_backward(*given, tiles=tiles, **dropout)]


# ---- interpreted: arguments of the case, tiles and tolerance

FEWER_KEYS = {"lengths": [20, 0, 7, 0, 40, 9, 3], "key_lengths": [5, 15, 7, 0, 35, 0, 21]}
CASES = {
    **{f"window {reach}": ({"lengths": LENGTHS, "reach": reach}, tiles, 1e-5) for reach, tiles in ((-1, TILES), (0, LONG), (3, TILES), (20, LONG), (64, TILES))},
    # As of PyLate's query expansion: texts of which some rows are not attended to, and keys that nobody sees.
    "fewer keys": (FEWER_KEYS | {"reach": 20}, TILES, 1e-5),
    "fewer keys, long": (FEWER_KEYS, LONG, 1e-5),
    "half, bf16": ({"lengths": LENGTHS, "reach": 20, "dtype": torch.bfloat16}, TILES, 1e-2),
    "half, fp16": ({"lengths": LENGTHS, "reach": 20, "dtype": torch.float16}, TILES, 1e-3),
    **{f"heads_and_layouts {heads} {dim}": ({"lengths": [3, 18, 40], "heads": heads, "dim": dim, "by_head": by_head}, TILES, 1e-5) for heads, dim, by_head in ((1, 32, True), (3, 64, False), (2, 24, True), (2, 96, False))},
}  # fmt: skip


@pytest.mark.interpret
@pytest.mark.parametrize("options, tiles, tolerance", CASES.values(), ids=CASES)
def test_definition(interpreted, options, tiles, tolerance):  # noqa: F811
    batch = case(**options)
    states, *gradients = outcome(batch, tiles)
    assert states.is_contiguous()
    for values, gradient in zip(batch[:3], gradients, strict=True):
        assert gradient.stride() == launch.laid_out(values).stride()
    assert max(distances([states, *gradients], definition(batch))) < tolerance


@pytest.mark.interpret
def test_slices_programs_of_several_tiles_large_logits_and_nothing(interpreted, monkeypatch):  # noqa: F811
    # Queries, keys and values of one Linear are copied, and their gradients are not in its layout.
    query, key, value = torch.randn(40, 3, 2, 16).unbind(1)
    sliced = case([8, 32])._replace(query=query, key=key, value=value)
    large = case(LENGTHS)
    for batch, tolerance in ((sliced, 1e-5), (large._replace(query=100 * large.query), 1e-4)):
        assert max(distances(outcome(batch, TILES), definition(batch))) < tolerance
    monkeypatch.setattr(launch, "MOST_PROGRAMS", 0)  # three for each text, of which one has five tiles
    assert max(distances(outcome(case([40, 70], 20), LONG), definition(case([40, 70], 20)))) < 1e-5
    for tiles in (TILES, LONG):
        states, log_sums = launch.forward(*case([0, 0]), tiles=tiles)
        assert states.shape == (0, 2, 16) and log_sums.shape == (2, 0)


@BOTH
@pytest.mark.interpret
@pytest.mark.parametrize("length", [5, 40])
def test_nan_shows(interpreted, tiles, length):  # noqa: F811
    batch = case([9, length, 7])
    batch.key[9 + length - 1, 1, 3] = torch.nan
    diverged = torch.zeros(len(batch.query), 2, dtype=torch.bool)
    diverged[9 : 9 + length, 1] = True
    for result in outcome(batch, tiles):
        assert torch.equal(result.isnan().any(dim=-1), diverged)


SEED = torch.tensor([2**40 + 3])


@pytest.mark.interpret
@pytest.mark.parametrize("reach, tiles", [(-1, TILES), (20, LONG)], ids=["both", "long"])
def test_dropout_interpreted(interpreted, reach, tiles):  # noqa: F811
    batch, options = (
        case([20, 0, 7, 40], reach, heads=1, dim=48, key_lengths=[5, 15, 7, 38]),
        {"seed": SEED, "dropout": 0.3},
    )
    keep = weights_kept(batch, lambda shown: launch.forward(*shown, tiles=tiles, **options)[0])
    assert max(distances(outcome(batch, tiles, **options), definition(batch, keep, 0.3))) < 1e-5


@pytest.mark.interpret
def test_what_dropout_keeps(interpreted):  # noqa: F811
    """It depends on seed, head, row and key, not on tiles."""
    batch = case([40, 40], dim=40)
    kept = {}
    for name, seed, tiles in (("both", 7, TILES), ("long", 7, LONG), ("other seed", 8, LONG)):
        options = {"seed": torch.tensor([seed]), "dropout": 0.25, "tiles": tiles}
        kept[name] = weights_kept(batch, lambda shown, options=options: launch.forward(*shown, **options)[0])
    assert torch.equal(kept["both"], kept["long"])
    first, second, other = kept["both"][:, :40], kept["both"][:, 40:], kept["other seed"][:, :40]
    assert abs(first.float().mean() - 0.75) < 0.03
    # Other texts, heads, rows, keys of one call of Philox, keys of two calls, and seeds.
    pairs = [(first, second), (first[0], first[1]), (first[:, 1:], first[:, :-1]), (first[..., 1:], first[..., :-1])]
    for ours, others in [*pairs, (first[..., 4:], first[..., :-4]), (first, other)]:
        assert abs((ours & others).float().mean() - 0.75**2) < 0.05, "independent"


@pytest.mark.interpret
def test_rotary_positions_with_dropout(interpreted):  # noqa: F811
    """The same weights are dropped as without rotary positions, forward and backward."""
    batch = rotary_case([5, 40], dim=16)
    batch = batch._replace(cos=torch.ones_like(batch.cos), sin=torch.zeros_like(batch.sin))
    plain = case([5, 40])._replace(**dict(zip(("query", "key", "value"), batch.qkv.unbind(1), strict=True)))
    states, *gradients = outcome(plain, TILES, seed=SEED, dropout=0.3)
    found = rotary(batch, TILES, seed=SEED, dropout=0.3)
    assert torch.equal(found[0], states) and torch.equal(found[1], torch.stack(gradients, dim=1))


ROTARY = {
    "both": ({"lengths": LENGTHS, "dim": 32}, TILES, 1e-5),
    "long": ({"lengths": LENGTHS, "reach": 3, "dim": 32}, LONG, 1e-5),
    "window": ({"lengths": LENGTHS, "reach": 20, "dim": 32}, TILES, 1e-5),
    "half": ({"lengths": LENGTHS, "reach": 20, "dtype": torch.float16, "heads": 3, "dim": 32}, TILES, 2e-3),
    # Rows that nobody attends to, and rows behind the last text: all of the gradient is written, with 0 for these.
    "rows_of_no_text": ({"lengths": [20, 0, 7, 9], "dim": 32, "key_lengths": [5, 15, 7, 2], "behind": 37}, TILES, 1e-5),
    "rows_of_no_text, long": ({"lengths": [20, 0, 7, 9], "dim": 32, "key_lengths": [5, 15, 7, 2], "behind": 37}, LONG, 1e-5),
}  # fmt: skip


@pytest.mark.interpret
@pytest.mark.parametrize("options, tiles, tolerance", ROTARY.values(), ids=ROTARY)
def test_rotary_positions_interpreted(interpreted, options, tiles, tolerance):  # noqa: F811
    batch = rotary_case(**options)
    if batch.qkv.dtype == torch.float16:
        batch = batch._replace(cos=batch.cos.bfloat16(), sin=batch.sin.bfloat16())
    states, gradient = rotary(batch, tiles)
    assert max(distances([states, gradient], rotary_definition(batch))) < tolerance
    if "behind" in options:
        assert not states[36:].any() and not gradient[5:20, 1:].any() and not gradient[36:].any()


# ---- on a GPU

BOUND = {torch.bfloat16: 4e-3, torch.float16: 6e-4}
ODD = [1, 5, 0, 31, 32, 33, 63, 64, 65, 127, 128, 129, 300, 700, 16]
MANY = [11] * 64 + [30, 80, 90, 140, 290] * 12


def on_gpu(lengths, reach=-1, dtype=torch.bfloat16, heads=3, dim=64, **options):
    return case(lengths, reach, dtype, "cuda", heads, dim, **options)


def check(batch):
    assert max(distances(outcome(batch), definition(batch))) < BOUND[batch.query.dtype]


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("dim", [32, 64, 96, 128])
@pytest.mark.parametrize("reach", [-1, 0, 7, 64, 128])
def test_lengths_windows_and_head_sizes(reach, dim, dtype):
    for by_head in (False, True) if dim == 64 else (False,):
        check(on_gpu(ODD, reach, dtype, dim=dim, by_head=by_head))
    query, key, value = torch.randn(40, 3, 2, dim, device="cuda", dtype=dtype).unbind(1)
    check(on_gpu([8, 32], reach, dtype, heads=2, dim=dim)._replace(query=query, key=key, value=value))


@pytest.mark.cuda
@pytest.mark.parametrize("dim", [32, 64, 96, 128])
@pytest.mark.parametrize("reach", [-1, 64])
def test_dropout(reach, dim):
    batch, seed = on_gpu([1, 5, 0, 31, 33, 65, 128, 129, 300], reach, dim=dim), torch.cuda.get_rng_state()

    def seeded(shown):
        torch.cuda.set_rng_state(seed)
        return text_attention(*shown, dropout=0.2)

    keep, gradient = weights_kept(batch, seeded), gradient_of(seeded(batch))
    torch.cuda.set_rng_state(seed)
    with no_waiting():
        found = outcome(batch, gradient=gradient, dropout=0.2)
    assert max(distances(found, definition(batch, keep, 0.2))) < BOUND[torch.bfloat16]


@pytest.mark.cuda
def test_dropout_on_average_and_in_a_captured_graph():
    batch = on_gpu([5, 40, 90, 200], heads=2)
    draws = torch.stack([text_attention(*batch, dropout=0.3).double() for _ in range(1000)])
    assert not torch.equal(draws[0], draws[1])
    error, exact = draws.std(dim=0) / len(draws) ** 0.5, definition(batch)[0]
    # Beside chance there is the rounding to bf16.
    assert ((draws.mean(dim=0) - exact).abs() < 6 * error + 0.01 * exact.abs().mean()).all()
    # The seed is drawn inside of the graph, so that each replay drops other weights.
    graph, states = captured(lambda: text_attention(*batch, dropout=0.3))
    graph.replay()
    first = states.clone()
    graph.replay()
    assert not torch.equal(first, states)


@pytest.mark.cuda
@pytest.mark.parametrize("seed", range(16))
def test_random_texts(seed):
    generator = torch.Generator().manual_seed(seed)

    def pick(*options):
        return options[int(torch.randint(len(options), (1,), generator=generator))]

    longest = pick(20, 64, 100, 300, 1500)
    lengths = torch.randint(0, longest + 1, (pick(1, 7, 90),), generator=generator).tolist()
    keys = torch.randint(0, longest + 1, (len(lengths),), generator=generator).tolist() if pick(False, True) else None
    sizes = pick(1, 2, 12), pick(16, 24, 32, 64, 72, 96, 128)
    check(on_gpu(lengths, pick(-1, 3, 64, 500), pick(*BOUND), *sizes, key_lengths=keys))


@pytest.mark.cuda
@pytest.mark.parametrize("reach", [-1, 64])
def test_as_exact_as_flash_attention(reach):
    batch = on_gpu(MANY, reach, heads=12)
    leaves = [values.detach().requires_grad_() for values in batch[:3]]
    states = torch.ops.aten._flash_attention_forward(
        *leaves, *batch[3:5], batch.max_length, batch.max_length, 0.0, False, False,
        scale=batch.scale, window_size_left=reach, window_size_right=reach,
    )[0]  # fmt: skip
    flash = [states.detach(), *torch.autograd.grad(states, leaves, gradient_of(states))]
    exact = definition(batch)
    for ours, theirs in zip(distances(outcome(batch), exact), distances(flash, exact), strict=True):
        assert ours <= 1.1 * theirs


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("reach", [-1, 0, 64])
def test_rotary_positions(reach, dtype):
    lengths = [1, 5, 0, 63, 64, 65, 127, 128, 129, 300, 700, 16]
    for key_lengths in (None, [1, 4, 1, 60, 64, 65, 120, 135, 100, 329, 650, 30]):
        batch = rotary_case(lengths, reach, dtype, "cuda", 3, 64, key_lengths, behind=200)
        states, gradient = rotary(batch)
        assert max(distances([states, gradient], rotary_definition(batch))) < BOUND[dtype]
        assert not states[-200:].any() and not gradient[-200:].any(), "rows of no text"


@pytest.mark.cuda
def test_repeatable_without_waiting():
    batch, turned = on_gpu(MANY, 64, heads=12), rotary_case(MANY, 64, torch.bfloat16, "cuda", 12, 64)
    qkv, eye = turned.qkv.flatten(1).requires_grad_(), torch.eye(36 * 64, device="cuda").bfloat16()
    gradient = gradient_of(turned.qkv[:, 0])

    def step():
        states = rotary_self_attention(qkv, eye, None, *turned[1:6], 12, *turned[6:])
        own = outcome(batch, gradient=gradient)
        return [*own, states.detach(), *torch.autograd.grad(states, qkv, gradient)]

    first = step()
    with no_waiting():
        again = [step() for _ in range(20)]
    assert all(torch.equal(*pair) for results in again for pair in zip(first, results, strict=True))


@pytest.mark.cuda
def test_registered_operators():
    batch = on_gpu([5, 70, 130], 64)
    leaves = [values.detach().requires_grad_() for values in batch[:3]]
    torch.library.opcheck(torch.ops.pylate_fastmaxsim.text_attention, (*leaves, *batch[3:], None, 0.0))
    x, weight, bias = (
        torch.randn(*size, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for size in ((205, 48), (384, 48), (384,))
    )
    turned = rotary_case([5, 70, 130], 64, torch.bfloat16, "cuda", 2, 64)
    arguments = (x, weight, bias, *turned[1:], None, 0.0)
    torch.library.opcheck(torch.ops.pylate_fastmaxsim.rotary_self_attention, arguments)


@pytest.mark.cuda
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


@pytest.mark.cuda
def test_vectors_that_the_kernels_do_not_take():
    said = "text_attention: on CUDA vectors must be bfloat16 or float16, of a multiple"
    for wrong in (on_gpu([5], dtype=torch.float32), on_gpu([5], dim=20), on_gpu([5], dim=136)):
        with pytest.raises(ValueError, match=said):
            text_attention(*wrong)


@pytest.fixture
def chosen(monkeypatch):
    """The operator, which batches of any size call; says whether it was called."""
    monkeypatch.setattr(operator, "FEWEST_TOKENS", 0)
    monkeypatch.setattr(encoding_attention, "text_attention", counted := Mock(wraps=text_attention))
    return counted


@pytest.mark.cuda
def test_in_the_place_of_flash_attention(chosen):
    batch = on_gpu([5, 70, 130], 20, heads=4)
    states = variable_length_attention(
        *batch[:4], batch.max_length, scale=None, window=(20, 20), dropout=0.0, key_cu_seqlens=batch.key_cu_seqlens
    )
    assert chosen.called and max(distances([states], definition(batch)[:1])) < BOUND[torch.bfloat16]


@pytest.mark.cuda
@pytest.mark.parametrize("loss, options", [("Contrastive", {}), ("CachedContrastive", {"mini_batch_size": 5})])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_losses_and_gradients(encoder, chosen, compiled, checkpointing, loss, options):
    from pylate import losses

    from tests.support.losses_cuda import assert_as_exact, batch_of, losses_of, stock_losses
    from tests.support.models import load_model

    loss_class = getattr(losses, loss)
    sizes = {"hidden_size": 128, "num_attention_heads": 2, "intermediate_size": 96, "local_attention": 24}
    model = load_model(encoder("modernbert", **sizes), document_length=48, device="cuda")
    batches = [batch_of(model, seed, count) for seed, count in ((0, 16), (5, 9))]
    expected = stock_losses(model, batches, loss_class, **options)
    if checkpointing:
        model[0].auto_model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    pylate_fastmaxsim.enable(compile=compiled)
    assert_as_exact(losses_of(model, batches, loss_class, **options), expected)
    assert chosen.called
