"""The attention kernels on a CPU through Triton's interpreter, against the definition in float64. Run with TRITON_INTERPRET=1."""

import pytest
import torch

pytest.importorskip("triton")

from pylate_fastmaxsim.kernels.attention import launch as attention_launch
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

pytestmark = [pytest.mark.interpret, pytest.mark.usefixtures("interpreted")]

# Small tiles: the interpreter pays per operation, and several must take part. Of both kinds, and of long texts only.
TILES = attention_launch.Tiles(
    (attention_launch.Tile(16, 4), attention_launch.Tile(32, 4)), attention_launch.Tile(16, 4)
)
LONG = attention_launch.Tiles((), attention_launch.Tile(16, 4))
LENGTHS = [5, 0, 16, 17, 1, 70, 32, 33]


@pytest.fixture
def fresh_memory_is_nan(monkeypatch):
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **options: empty(*size, **options).fill_(torch.nan))


def check(batch, tiles=TILES, tolerance=1e-5):
    states, log_sums = attention_launch.forward(*batch, tiles=tiles)
    gradients = attention_launch.backward(gradient_of(states), *batch[:3], states, log_sums, *batch[3:], tiles=tiles)
    assert states.is_contiguous()
    for values, gradient in zip(batch[:3], gradients, strict=True):
        assert gradient.stride() == attention_launch.laid_out(values).stride()
    assert max(distances([states, *gradients], definition(batch))) < tolerance


@pytest.mark.parametrize("reach, tiles", [(-1, TILES), (0, LONG), (3, TILES), (20, LONG), (64, TILES)])
def test_windows(reach, tiles):
    check(case(LENGTHS, reach), tiles)


def test_programs_of_long_texts_take_several_tiles(monkeypatch):
    """Three for each text, of which one has five tiles."""
    monkeypatch.setattr(attention_launch, "MOST_PROGRAMS", 0)
    check(case([40, 70], 20), LONG)


@pytest.mark.parametrize("tiles, reach", [(TILES, 20), (LONG, -1)], ids=["both", "long"])
def test_fewer_keys_than_rows(reach, tiles):
    """As of PyLate's query expansion: texts of which some rows are not attended to, and keys that nobody sees."""
    rows, keys = [20, 0, 7, 0, 40, 9, 3], [5, 15, 7, 0, 35, 0, 21]
    check(case(rows, reach, key_lengths=keys), tiles)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half(dtype):
    check(case(LENGTHS, 20, dtype), tolerance=1e-2 if dtype == torch.bfloat16 else 1e-3)


@pytest.mark.parametrize("heads, dim, by_head", [(1, 32, True), (3, 64, False), (2, 24, True), (2, 96, False)])
def test_heads_and_layouts(heads, dim, by_head):
    check(case([3, 18, 40], heads=heads, dim=dim, by_head=by_head))


def test_slices_of_a_larger_product():
    """As queries, keys and values of one Linear are: they are copied, and their gradients are not in its layout."""
    query, key, value = torch.randn(40, 3, 2, 16).unbind(1)
    check(case([8, 32])._replace(query=query, key=key, value=value))


@pytest.mark.parametrize("tiles", [TILES, LONG], ids=["both", "long"])
@pytest.mark.parametrize("length", [5, 40])
def test_nan_shows(tiles, length):
    batch = case([9, length, 7])
    batch.key[9 + length - 1, 1, 3] = torch.nan
    states, log_sums = attention_launch.forward(*batch, tiles=tiles)
    gradients = attention_launch.backward(gradient_of(states), *batch[:3], states, log_sums, *batch[3:], tiles=tiles)
    diverged = torch.zeros(len(states), 2, dtype=torch.bool)
    diverged[9 : 9 + length, 1] = True
    for result in (states, *gradients):
        assert torch.equal(result.isnan().any(dim=-1), diverged)


SEED = torch.tensor([2**40 + 3])


@pytest.mark.parametrize("reach, tiles", [(-1, TILES), (20, LONG)], ids=["both", "long"])
def test_dropout(reach, tiles):
    batch, dropout = case([20, 0, 7, 40], reach, heads=1, dim=48, key_lengths=[5, 15, 7, 38]), 0.3
    options = {"seed": SEED, "dropout": dropout, "tiles": tiles}
    keep = weights_kept(batch, lambda shown: attention_launch.forward(*shown, **options)[0])
    states, log_sums = attention_launch.forward(*batch, **options)
    gradients = attention_launch.backward(gradient_of(states), *batch[:3], states, log_sums, *batch[3:], **options)
    assert max(distances([states, *gradients], definition(batch, keep, dropout))) < 1e-5


def test_what_dropout_keeps():
    """It depends on seed, head, row and key, not on tiles."""
    batch = case([40, 40], dim=40)
    kept = {}
    for name, seed, tiles in (("both", 7, TILES), ("long", 7, LONG), ("other seed", 8, LONG)):
        options = {"seed": torch.tensor([seed]), "dropout": 0.25, "tiles": tiles}
        kept[name] = weights_kept(batch, lambda shown, options=options: attention_launch.forward(*shown, **options)[0])
    assert torch.equal(kept["both"], kept["long"])
    first, second, other = kept["both"][:, :40], kept["both"][:, 40:], kept["other seed"][:, :40]
    assert abs(first.float().mean() - 0.75) < 0.03
    # Other texts, heads, rows, keys of one call of Philox, keys of two calls, and seeds.
    pairs = [(first, second), (first[0], first[1]), (first[:, 1:], first[:, :-1]), (first[..., 1:], first[..., :-1])]
    for ours, others in [*pairs, (first[..., 4:], first[..., :-4]), (first, other)]:
        assert abs((ours & others).float().mean() - 0.75**2) < 0.05, "independent"


def test_large_logits():
    batch = case(LENGTHS)
    check(batch._replace(query=100 * batch.query), tolerance=1e-4)


def test_nothing():
    for tiles in (TILES, LONG):
        states, log_sums = attention_launch.forward(*case([0, 0]), tiles=tiles)
        assert states.shape == (0, 2, 16) and log_sums.shape == (2, 0)


def rotary(batch, tiles):
    qkv = batch.qkv.clone()
    states, log_sums = attention_launch.rotary_forward(qkv, *batch[1:], tiles=tiles)
    gradient = gradient_of(states)
    return states, attention_launch.rotary_backward(
        gradient, qkv, *batch[1:3], states, log_sums, *batch[3:], tiles=tiles
    )


def test_rotary_positions_with_dropout():
    """The same weights are dropped as without rotary positions, forward and backward."""
    batch = rotary_case([5, 40], dim=16)
    batch = batch._replace(cos=torch.ones_like(batch.cos), sin=torch.zeros_like(batch.sin))
    plain = case([5, 40])._replace(**dict(zip(("query", "key", "value"), batch.qkv.unbind(1), strict=True)))
    options = {"seed": SEED, "dropout": 0.3, "tiles": TILES}
    results = []
    for forward, backward, vectors, rest in (
        (attention_launch.forward, attention_launch.backward, plain[:3], plain[3:]),
        (attention_launch.rotary_forward, attention_launch.rotary_backward, batch[:3], batch[3:]),
    ):
        states, log_sums = forward(*vectors, *rest, **options)
        gradients = backward(gradient_of(states), *vectors, states, log_sums, *rest, **options)
        results.append([states, torch.stack(gradients, dim=1) if isinstance(gradients, tuple) else gradients])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("reach, tiles", [(-1, TILES), (3, LONG), (20, TILES)])
def test_rotary_positions(reach, tiles):
    batch = rotary_case(LENGTHS, reach, dim=32)
    assert max(distances(rotary(batch, tiles), rotary_definition(batch))) < 1e-5


def test_rotary_positions_of_half_precision():
    batch = rotary_case(LENGTHS, 20, torch.float16, heads=3, dim=32)
    batch = batch._replace(cos=batch.cos.bfloat16(), sin=batch.sin.bfloat16())
    assert max(distances(rotary(batch, TILES), rotary_definition(batch))) < 2e-3


@pytest.mark.parametrize("tiles", [TILES, LONG], ids=["both", "long"])
def test_rows_of_no_text(tiles, fresh_memory_is_nan):
    """Rows that nobody attends to, and rows behind the last text: all of the gradient is written, with 0 for these."""
    batch = rotary_case([20, 0, 7, 9], dim=32, key_lengths=[5, 15, 7, 2], behind=37)
    states, gradient = rotary(batch, tiles)
    assert max(distances([states, gradient], rotary_definition(batch))) < 1e-5
    assert not states[36:].any() and not gradient[5:20, 1:].any() and not gradient[36:].any()
