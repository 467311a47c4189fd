"""The kernels of the projection, run on a CPU through Triton's interpreter, against the definition in float64. Run with TRITON_INTERPRET=1."""

import pytest
import torch

pytest.importorskip("triton")

from pylate_fastmaxsim.cpu import projection as blocked
from pylate_fastmaxsim.kernels.projection import launch as projection_launch
from pylate_fastmaxsim.kernels.projection import tiles as projection_tiles
from tests.support.chosen_tiles import choose_tiles
from tests.support.interpreter import interpreted, spread_out  # noqa: F401
from tests.support.projection_exactness import TOLERANCE, check, problem

pytestmark = [pytest.mark.interpret, pytest.mark.usefixtures("interpreted")]

# Small tiles: the interpreter pays per operation and per element, and several tiles must take part.
TILES = {
    "project": projection_tiles.ProjectionTiles(16, 32, 32, 4, 1),
    "hidden_gradient": projection_tiles.ProjectionTiles(16, 32, 32, 4, 1),
    "weight_gradient": projection_tiles.WeightGradientTiles(16, 32, 32, 4, 1),
}


@pytest.fixture(autouse=True)
def _small_tiles(request, monkeypatch):
    if "of_the_table" not in request.node.name:
        choose_tiles(monkeypatch, projection_launch, **TILES)


@pytest.fixture(autouse=True)
def _several_parts(monkeypatch):
    monkeypatch.setattr(projection_tiles, "_FEWEST_ROWS", 16)
    monkeypatch.setattr(projection_tiles, "_ENOUGH_PROGRAMS", 12)


# One block of columns and several, and sizes that fill no block.
@pytest.mark.parametrize(
    "dim_in, dim_out, normalize, bias",
    [(64, 32, True, True), (80, 48, False, True), (80, 48, True, False), (33, 7, True, True), (96, 100, True, True)],
)
def test_sizes(dim_in, dim_out, normalize, bias):
    check(projection_launch, *problem(50, dim_in, dim_out, bias=bias), normalize)


@pytest.mark.parametrize("dtype, precision", TOLERANCE, ids=str)
@pytest.mark.parametrize("dim_out", [32, 70])
def test_dtypes(dtype, precision, dim_out):
    # The interpreter cuts off where a GPU rounds, to bf16.
    tolerance = 1e-2 if dtype == torch.bfloat16 else None
    check(projection_launch, *problem(40, 64, dim_out, dtype), precision=precision, tolerance=tolerance)


@pytest.mark.parametrize("rows", [0, 1, 16, 33])
def test_numbers_of_rows(rows):
    check(projection_launch, *problem(rows, 48, 40))


@pytest.mark.parametrize("dim_out", [32, 40])
def test_rows_without_a_gradient_are_not_read(dim_out):
    hidden, weight, bias, grad = problem(64, 48, dim_out, dead=0.5)
    grad[16:32] = 0
    hidden[grad.eq(0).all(dim=1)] = float("nan")
    # Vectors shorter than epsilon.
    hidden[40:42] *= torch.tensor([[0], [1e-15]])
    check(projection_launch, hidden, weight, bias, grad)


def test_tiles_of_the_table():
    check(projection_launch, *problem(70, 64, 128))


@pytest.mark.parametrize("needs", [(True, False, False), (False, True, False), (False, False, True)])
def test_only_one_gradient(needs):
    hidden, weight, bias, grad = problem(40, 48, 32)
    saved = projection_launch.forward(hidden, weight, bias, True, "highest")
    arguments = (grad, hidden, weight, *saved, True, "highest")
    every = projection_launch.backward(*arguments, True, True, True)
    some = projection_launch.backward(*arguments, *needs)
    for own, other, need in zip(some, every, needs, strict=True):
        assert torch.equal(own, other) if need else own.numel() == 0


def test_a_weight_of_another_dtype():
    hidden, weight, bias, grad = problem(40, 48, 32, torch.bfloat16)
    wide, wide_bias = weight.float(), bias.float()
    narrow = projection_launch.forward(hidden, weight, bias, True, "highest")
    own = projection_launch.forward(hidden, wide, wide_bias, True, "highest")
    assert torch.equal(own[0], narrow[0]) and own[0].dtype == torch.bfloat16
    arguments = (*own, True, "highest", True, True, True)
    gradients = projection_launch.backward(grad, hidden, wide, *arguments)
    rounded = projection_launch.backward(grad, hidden, weight, *arguments)
    assert gradients[1].dtype == gradients[2].dtype == torch.float32
    assert torch.equal(gradients[1].bfloat16(), rounded[1]) and not torch.equal(gradients[1], rounded[1].float())


@pytest.mark.parametrize("dim_out", [32, 70])
def test_strided_tensors(dim_out):
    hidden, weight, bias, grad = problem(40, 48, dim_out)
    strided = [spread_out(each) for each in (hidden, weight, bias)]
    saved = projection_launch.forward(hidden, weight, bias, True, "highest")
    assert all(map(torch.equal, projection_launch.forward(*strided, True, "highest"), saved))
    options = (True, "highest", True, True, True)
    for ours, plain in ((spread_out(grad), grad), (torch.ones(1, 1).expand(grad.shape), torch.ones_like(grad))):
        expected = projection_launch.backward(plain, hidden, weight, *saved, *options)
        strided_saved = spread_out(saved[0]), saved[1]
        actual = projection_launch.backward(ours, *strided[:2], *strided_saved, *options)
        assert all(map(torch.equal, actual, expected))


@pytest.mark.parametrize("normalize", [True, False])
def test_of_nothing_the_bias_is_left(normalize):
    hidden, weight, bias, grad = problem(20, 0, 40)
    needs = True, True, True
    options = normalize, "highest"
    ours, other = (
        path.backward(grad, hidden, weight, *path.forward(hidden, weight, bias, *options), *options, *needs)
        for path in (projection_launch, blocked)
    )
    torch.testing.assert_close(ours, other)
    assert ours[2].any()


def test_what_is_not_a_number_shows():
    hidden, weight, bias, grad = problem(20, 48, 32)
    hidden[2, 3] = float("nan")
    hidden[4, 1] = float("inf")
    embeddings, inverse_norms = saved = projection_launch.forward(hidden, weight, bias, True, "highest")
    assert embeddings.isnan().all(dim=1).nonzero().squeeze(1).tolist() == [2, 4]
    grad[7, 0] = float("nan")
    gradients = projection_launch.backward(grad, hidden, weight, *saved, True, "highest", True, True, True)
    assert gradients[0].isnan().all(dim=1).nonzero().squeeze(1).tolist() == [2, 4, 7]
